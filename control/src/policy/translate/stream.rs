//! Converts routes of TLS and opaque connections to protobuf.

use tulle_proto::opaque_route::{Forbidden, Invalid};
use tulle_proto::outbound::{OpaqueRoute, TlsRoute, opaque_route, tls_route};
use tulle_proto::tls_route::{SniMatch, sni_match};

use crate::model::outbound::{self as model, Distribution, StreamAction, StreamRoute};
use crate::model::route::{Filter, HostMatch};
use crate::policy::translate::backend::backend;
use crate::policy::translate::metadata;

/// Generates the translation of a rule for one of the two message families, which differ only in names.
macro_rules! stream_rule {
    ($route:expr, $family:ident) => {{
        use $family::distribution::{Empty, FirstAvailable, Kind, RandomAvailable};
        use $family::filter::Kind as FilterKind;
        let route_backend = |model_backend: &model::Backend| {
            let failure = |filter: &Filter| match filter {
                Filter::FailStream { message } => Some($family::Filter {
                    kind: Some(FilterKind::Invalid(Invalid {
                        message: message.clone(),
                    })),
                }),
                _ => None,
            };
            $family::RouteBackend {
                backend: Some(backend(model_backend)),
                filters: model_backend.filters.iter().filter_map(failure).collect(),
            }
        };
        let (kind, filters) = match &$route.action {
            StreamAction::Forbidden => {
                let forbidden = $family::Filter {
                    kind: Some(FilterKind::Forbidden(Forbidden {})),
                };
                (Kind::Empty(Empty {}), vec![forbidden])
            }
            StreamAction::Forward(Distribution::Single(single)) => {
                let backends = vec![route_backend(single)];
                (Kind::FirstAvailable(FirstAvailable { backends }), Vec::new())
            }
            StreamAction::Forward(Distribution::Weighted(backends)) => {
                let weighted = |(model_backend, weight): &(model::Backend, u32)| $family::WeightedRouteBackend {
                    backend: Some(route_backend(model_backend)),
                    weight: *weight,
                };
                let backends = backends.iter().map(weighted).collect();
                (Kind::RandomAvailable(RandomAvailable { backends }), Vec::new())
            }
        };
        $family::Rule {
            backends: Some($family::Distribution { kind: Some(kind) }),
            filters,
        }
    }};
}

pub(super) fn opaque_route(route: &StreamRoute) -> OpaqueRoute {
    OpaqueRoute {
        metadata: Some(metadata(&route.reference)),
        rules: vec![stream_rule!(route, opaque_route)],
    }
}

pub(super) fn tls_route(route: &StreamRoute) -> TlsRoute {
    TlsRoute {
        metadata: Some(metadata(&route.reference)),
        snis: route.snis.iter().map(sni).collect(),
        rules: vec![stream_rule!(route, tls_route)],
    }
}

fn sni(host: &HostMatch) -> SniMatch {
    let matched = match host {
        HostMatch::Exact(name) => sni_match::Match::Exact(name.clone()),
        HostMatch::Suffix(labels) => sni_match::Match::Suffix(sni_match::Suffix {
            reverse_labels: labels.clone(),
        }),
    };
    SniMatch { r#match: Some(matched) }
}
