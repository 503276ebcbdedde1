//! Sends a request by the routes of its destination: route, filters, attempts, response (O6–O12).

use http::{Request, Response, Version};
use tulle_core::names::header as names;

use crate::{
    http::{body::Body, error::Error, headers, lifecycle::classify, stack::filters},
    outbound::{
        destination::snapshot::{CompiledAction, Destination, Plan, Router},
        metrics::RouteResponseObserver,
        request::{
            attempt::{AttemptParams, AttemptSender, apply_response_filters},
            connect::TriedEndpoints,
            context::{ClientContext, OutgoingRequest},
            mirror,
            observe::{ResponseRecorder, RouteRequestGuard, RouteSource},
            profile, retry,
        },
    },
    policy::{
        client::{ClientPolicy, HeaderOverrides},
        cors::CorsRequest,
        filter,
        matches::{RequestAttributes, path},
        route::{self, Route, RouteMatch},
    },
};

/// Sends a request by its route of the policy, or by the ServiceProfile that replaces the routes.
///
/// # Errors
/// The request has no route, a filter responds to it, or its last attempt failed.
pub(in crate::outbound) async fn route_and_send(
    client: ClientContext<'_>,
    destination: &Destination,
    outgoing: &mut OutgoingRequest<'_>,
) -> Result<Response<Body>, Error> {
    let snapshot = destination.snapshot(); // one for the whole request
    let router = select_router(&snapshot.plan, outgoing.req.version())?;
    let required_identity = take_required_identity(outgoing.req);
    let new_sender = |route_source, backends, matched_prefix_len, route_request| AttemptSender {
        client,
        route_source,
        required_identity: required_identity.as_deref(),
        backends,
        matched_prefix_len,
        route_request,
    };
    let routes = match router {
        Router::Routes(routes) => routes,
        Router::Profile(compiled) => {
            let sender = new_sender(RouteSource::Profile(compiled.routes()), &compiled.backends, None, None);
            return Box::pin(profile::send_by_profile(compiled, &sender, outgoing)).await;
        }
    };
    let attributes = RequestAttributes::new(outgoing.req.method(), outgoing.req.uri(), outgoing.req.headers());
    let found = find_route(&snapshot.policy, routes, &attributes)?.ok_or(Error::RouteNotFound)?; // O6
    if headers::is_connect_tunnel(outgoing.req) {
        check_tunnel(&snapshot.policy, routes, &attributes, &found)?;
    }
    let CompiledAction {
        backends,
        mirrors,
        timeouts_and_retries,
        series,
    } = &found.rule.action;
    let route_source = RouteSource::Route(&found.route.meta);
    let mut request_guard = RouteRequestGuard::begin(series, outgoing.req);
    // Boxed because few routes have this filter.
    let cors = filter::find_cors(&found.rule.filters).map(|cors| Box::new(cors.for_request(outgoing.req.headers())));
    let preflight = |cors: &CorsRequest<'_>| cors.preflight_response(outgoing.req.method(), outgoing.req.headers());
    if let Some(headers) = cors.as_deref().and_then(preflight) {
        return Ok(request_guard.respond(headers));
    }
    let result = match filters::apply_request_filters(&found.rule.filters, outgoing.req, found.matched_prefix_len) {
        Err(response) => Err(response),
        // O7–O11
        Ok(matched_prefix_len) => {
            let overrides = timeouts_and_retries
                .as_ref()
                .map_or(HeaderOverrides::Ignore, |rule| rule.header_overrides);
            mirror::send_copies(client, mirrors, overrides, outgoing);
            let route_sender = |recorder| {
                let route_request = Some((&request_guard, recorder));
                new_sender(route_source, backends, matched_prefix_len, route_request)
            };
            match timeouts_and_retries {
                None => {
                    let sender = route_sender(ResponseRecorder::AttemptGuard);
                    let params = AttemptParams::plain(request_guard.timing.started_at());
                    sender.send_attempt(outgoing, &mut TriedEndpoints::new(), params).await
                }
                // Boxed because its timers make the future large.
                Some(timeouts_and_retries) => {
                    let sender = route_sender(ResponseRecorder::ResponseObserver);
                    let metrics = &**request_guard.series();
                    let result = Box::pin(retry::send_by_rule(timeouts_and_retries, &sender, outgoing, metrics)).await;
                    result.map(|rsp| {
                        let (route, timing) = (request_guard.series().clone(), request_guard.timing.clone());
                        classify::observe(rsp, timing.started_at(), RouteResponseObserver { route, timing })
                    })
                }
            }
        }
    };
    request_guard.record_if_failed(&result);
    let mut rsp = result?;
    apply_response_filters(&found.rule.filters, &mut rsp); // O12
    if let Some(cors) = cors {
        cors.apply_response(rsp.headers_mut());
    }
    Ok(rsp)
}

/// Finds the rule that matches a request.
///
/// # Errors
/// The path is ambiguous, and rules of an EgressNetwork for this host depend on the path.
fn find_route<'a, T>(
    policy: &ClientPolicy,
    routes: &'a [Route<T>],
    attributes: &RequestAttributes<'_>,
) -> Result<Option<RouteMatch<'a, T>>, Error> {
    if !policy.compares_normalized_paths() || !routes.iter().any(|route| route.depends_on_path_for_host(attributes)) {
        return Ok(route::find(routes, attributes));
    }
    let normalized_path = path::normalize(attributes.path).ok_or(Error::AmbiguousPath)?;
    Ok(route::find_by_normalized_path(routes, attributes, &normalized_path))
}

/// Checks that the bytes of a CONNECT tunnel do not bypass rules of an EgressNetwork. `found` is the rule for the CONNECT request.
///
/// # Errors
/// The EgressNetwork has routes, and `found` does not require the method CONNECT.
fn check_tunnel<T>(
    policy: &ClientPolicy,
    routes: &[Route<T>],
    attributes: &RequestAttributes<'_>,
    found: &RouteMatch<'_, T>,
) -> Result<(), Error> {
    if !policy.is_egress_network()
        || found.requires_request_method(attributes)
        || !routes.iter().any(Route::is_user_defined)
    {
        return Ok(());
    }
    Err(Error::Forbidden {
        policy: policy.meta.to_string(),
    })
}

fn select_router(plan: &Plan, version: Version) -> Result<&Router, Error> {
    match plan {
        Plan::Detect { http2, .. } if version == Version::HTTP_2 => Ok(http2),
        Plan::Detect { http1, .. } => Ok(http1),
        Plan::Http1(router) | Plan::Http2(router) => Ok(router),
        Plan::Opaque(_) | Plan::Tls { .. } => Err(Error::InvalidPolicy("this destination does not accept HTTP".into())),
    }
}

/// Removes `l5d-require-id` and returns the identity in it.
fn take_required_identity(req: &mut Request<Body>) -> Option<String> {
    headers::get(req.headers(), &names::L5D_REQUIRE_ID)?;
    let required = req.headers_mut().remove(names::L5D_REQUIRE_ID)?;
    Some(String::from_utf8_lossy(required.as_bytes()).into_owned())
}

#[cfg(test)]
mod tests {
    use http::{HeaderMap, Method, Uri};
    use tulle_proto::{
        http_route::{self, HostMatch, HttpRouteMatch, PathMatch, host_match},
        meta::{Metadata, Resource, metadata},
        outbound::{OutboundPolicy, ProxyProtocol, http_route as proto, proxy_protocol},
    };

    use super::*;
    use crate::policy::{
        client::ClientProtocol,
        decode,
        matches::{HttpMatch, RequestMatch},
        route::Rule,
    };

    fn metadata(kind: &str) -> Option<Metadata> {
        let resource = Resource {
            group: "policy.linkerd.io".into(),
            kind: kind.into(),
            name: "out".into(),
            namespace: "shop".into(),
            ..Resource::default()
        };
        Some(Metadata {
            kind: Some(metadata::Kind::Resource(resource)),
        })
    }

    /// Decodes a policy with one route, for paths of `a.test` that begin with `/%70ublic`.
    fn decode_policy(kind: &str) -> ClientPolicy {
        let path = http_route::path_match::Kind::Prefix("/%70ublic".into());
        let rule = proto::Rule {
            matches: vec![HttpRouteMatch {
                path: Some(PathMatch { kind: Some(path) }),
                ..HttpRouteMatch::default()
            }],
            backends: Some(proto::Distribution {
                kind: Some(proto::distribution::Kind::Empty(proto::distribution::Empty {})),
            }),
            ..proto::Rule::default()
        };
        let host = HostMatch {
            r#match: Some(host_match::Match::Exact("a.test".into())),
        };
        let route = tulle_proto::outbound::HttpRoute {
            metadata: metadata("HTTPRoute"),
            hosts: vec![host],
            rules: vec![rule],
        };
        let http = proxy_protocol::Http1 {
            routes: vec![route],
            failure_accrual: None,
        };
        let message = OutboundPolicy {
            metadata: metadata(kind),
            protocol: Some(ProxyProtocol {
                kind: Some(proxy_protocol::Kind::Http1(http)),
            }),
        };
        decode::outbound::client_policy(message).unwrap()
    }

    #[test]
    fn rules_of_an_egress_network_are_compared_with_the_normal_form_of_the_path() {
        for (kind, path, expected) in [
            ("EgressNetwork", "/public/a", Some(true)),
            ("EgressNetwork", "/%70ublic/a", Some(true)),
            ("EgressNetwork", "/admin", Some(false)),
            ("EgressNetwork", "/public/../admin", None),
            ("EgressNetwork", "/public/%2e%2e/admin", None),
            ("EgressNetwork", "/public//a", None),
            ("EgressNetwork", "/other//a", Some(false)), // its host has no rule that depends on the path
            // Rules of Services are compared with the original path, because they cannot deny paths.
            ("Service", "/%70ublic/../admin", Some(true)),
            ("Service", "/public/a", Some(false)),
        ] {
            let policy = decode_policy(kind);
            let ClientProtocol::Http1(http) = &policy.protocol else {
                panic!("{policy:?}");
            };
            let host = if path.starts_with("/other") { "b.test" } else { "a.test" };
            let uri: Uri = format!("http://{host}{path}").parse().unwrap();
            let headers = HeaderMap::new();
            let found = find_route(
                &policy,
                &http.routes,
                &RequestAttributes::new(&Method::GET, &uri, &headers),
            );
            let found = found.map(|found| found.is_some());
            match expected {
                Some(expected) => assert_eq!(found.unwrap(), expected, "{kind} {path}"),
                None => assert!(matches!(found, Err(Error::AmbiguousPath)), "{kind} {path}"),
            }
        }
    }

    #[test]
    fn a_connect_tunnel_does_not_bypass_rules_of_an_egress_network() {
        for (kind, adds_connect_rule, is_permitted) in [
            ("EgressNetwork", false, false),
            ("EgressNetwork", true, true),
            ("Service", false, true),
        ] {
            let policy = decode_policy(kind);
            let ClientProtocol::Http1(http) = &policy.protocol else {
                panic!("{policy:?}");
            };
            let mut routes = http.routes.to_vec();
            let rule = Rule {
                matches: match adds_connect_rule {
                    true => vec![RequestMatch::Http(HttpMatch {
                        method: Some(Method::CONNECT),
                        ..HttpMatch::default()
                    })],
                    false => Vec::new(),
                },
                filters: Vec::new(),
                action: routes[0].rules[0].action.clone(),
            };
            routes.push(Route {
                hosts: Vec::new(),
                rules: vec![rule],
                ..routes[0].clone()
            });
            let (uri, headers) = (Uri::from_static("a.test:443"), HeaderMap::new());
            let attributes = RequestAttributes::new(&Method::CONNECT, &uri, &headers);
            let found = find_route(&policy, &routes, &attributes).unwrap().unwrap();
            let checked = check_tunnel(&policy, &routes, &attributes, &found);
            assert_eq!(checked.is_ok(), is_permitted, "{kind} {adds_connect_rule}");
        }
    }
}
