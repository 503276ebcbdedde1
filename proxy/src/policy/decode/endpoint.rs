//! Endpoints and their changes, from `destination.proto`.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::num::NonZeroU16;

use tulle_core::addr;
use tulle_core::identity::Identity;
use tulle_proto::destination as proto;
use tulle_proto::net::TcpAddress;

use crate::policy::decode::fields::{DecodeError, client_meta, duration};
use crate::policy::endpoint::{
    EndpointSpec, EndpointTls, EndpointUpdate, FRAME_SIZES, FallbackFlag, Http2Params, KeepAlive, Locality, MAX_WINDOW,
    ProtocolHint, Weight,
};

/// Decodes a change to a set of endpoints. An endpoint that cannot be decoded is left out. One with incomplete keep-alive settings
/// is used without them. In both cases `on_invalid` is called with the reason.
///
/// # Errors
/// The message is empty or has an unknown update.
pub(crate) fn endpoint_update(
    message: proto::Update,
    mut on_invalid: impl FnMut(DecodeError),
) -> Result<EndpointUpdate, DecodeError> {
    match message.update.ok_or(DecodeError::Missing("update"))? {
        proto::update::Update::Add(set) => {
            let specs = set.addrs.into_iter().filter_map(|message| {
                let spec = endpoint(message, &set.metric_labels, &mut on_invalid);
                spec.and_then(reject_link_local).map_err(&mut on_invalid).ok()
            });
            Ok(EndpointUpdate::Add(specs.collect()))
        }
        proto::update::Update::Remove(set) => {
            // An address that cannot be decoded was never added.
            Ok(EndpointUpdate::Remove(
                set.addrs
                    .into_iter()
                    .filter_map(|message| socket_addr(Some(message)).ok())
                    .collect(),
            ))
        }
        proto::update::Update::NoEndpoints(_) => Ok(EndpointUpdate::NoEndpoints),
    }
}

/// # Errors
/// The address is link-local. If it were accepted, write access to endpoints would be enough to send clients to such addresses.
fn reject_link_local(spec: EndpointSpec) -> Result<EndpointSpec, DecodeError> {
    match addr::is_link_local(spec.addr.ip()) {
        true => Err(DecodeError::invalid(
            ADDRESS,
            spec.addr,
            "an address that is not link-local",
        )),
        false => Ok(spec),
    }
}

/// Decodes one endpoint; `set_labels` are the labels of its set. If its keep-alive settings are incomplete, `on_incomplete` is
/// called with the reason, and the endpoint has none of its own, as in Linkerd's proxy.
///
/// # Errors
/// The address is missing or cannot be dialled, or the identity, server name or authority is invalid. Such an endpoint is never
/// used in plaintext instead: an update of endpoints leaves it out; a profile or policy that contains it is refused.
pub(super) fn endpoint(
    message: proto::WeightedAddr,
    set_labels: &BTreeMap<String, String>,
    on_incomplete: impl FnMut(DecodeError),
) -> Result<EndpointSpec, DecodeError> {
    let mut labels = set_labels.clone();
    labels.extend(message.metric_labels);
    let locality = match labels.get("zone_locality").map(String::as_str) {
        Some("local") => Locality::Local,
        Some("remote") => Locality::Remote,
        _ => Locality::Unknown,
    };
    let (hint, opaque_transport) = match message.protocol_hint {
        Some(hint) => {
            let port = hint
                .opaque_transport
                .and_then(|transport| u16::try_from(transport.inbound_port).ok())
                .filter(|port| *port < u16::MAX); // 65535 is ignored, as in Linkerd's proxy
            let hint = match hint.protocol {
                Some(proto::protocol_hint::Protocol::H2(_)) => ProtocolHint::H2,
                Some(proto::protocol_hint::Protocol::Opaque(_)) => ProtocolHint::Opaque,
                None => ProtocolHint::Unknown,
            };
            (hint, port.and_then(NonZeroU16::new))
        }
        None => (ProtocolHint::Unknown, None),
    };
    let authority = message.authority_override.map(|message| message.authority_override);
    let authority = authority.filter(|authority| !authority.is_empty()).map(|authority| {
        let parsed = authority.parse();
        parsed.map_err(|_| DecodeError::invalid("authority of an endpoint", authority, "<name>:<port>"))
    });
    Ok(EndpointSpec {
        addr: socket_addr(message.addr)?,
        weight: Weight::new(message.weight),
        labels,
        tls: message.tls_identity.map(tls).transpose()?,
        hint,
        opaque_transport,
        authority_override: authority.transpose()?,
        http2: message
            .http2
            .map(|message| http2_params(message, on_incomplete))
            .unwrap_or_default(),
        locality,
        is_fallback: FallbackFlag::new(message.is_fallback),
        resource: client_meta(message.resource_ref).ok(),
    })
}

const ADDRESS: &str = "address of an endpoint";

fn socket_addr(message: Option<TcpAddress>) -> Result<SocketAddr, DecodeError> {
    let message = message.ok_or(DecodeError::Missing(ADDRESS))?;
    let addr: SocketAddr = message
        .try_into()
        .map_err(|source| DecodeError::Convert { field: ADDRESS, source })?;
    if addr.port() == 0 {
        return Err(DecodeError::invalid(ADDRESS, addr, "a port from 1 to 65535"));
    }
    Ok(addr)
}

/// # Errors
/// The identity or the server name is missing or invalid.
fn tls(message: proto::TlsIdentity) -> Result<EndpointTls, DecodeError> {
    const IDENTITY: &str = "identity of an endpoint";
    const SERVER_NAME: &str = "server name of an endpoint";
    let server_name = message.server_name.map(|name| name.name);
    let (identity, server_name) = match message.strategy.ok_or(DecodeError::Missing(IDENTITY))? {
        proto::tls_identity::Strategy::DnsLikeIdentity(dns) => {
            let Ok(identity @ Identity::Dns(_)) = dns.name.parse() else {
                return Err(DecodeError::invalid(IDENTITY, dns.name, "a DNS name"));
            };
            let server_name = server_name.unwrap_or(dns.name);
            (identity, server_name)
        }
        // A URI is not a server name, so the message must have one.
        proto::tls_identity::Strategy::UriLikeIdentity(uri) => {
            let Ok(identity @ Identity::Uri(_)) = uri.uri.parse() else {
                return Err(DecodeError::invalid(
                    IDENTITY,
                    uri.uri,
                    "a URI, such as spiffe://domain/path",
                ));
            };
            (identity, server_name.ok_or(DecodeError::Missing(SERVER_NAME))?)
        }
    };
    match server_name.parse() {
        Ok(Identity::Dns(server_name)) => Ok(EndpointTls { identity, server_name }),
        _ => Err(DecodeError::invalid(SERVER_NAME, server_name, "a DNS name")),
    }
}

/// HTTP/2 settings, limited to the ranges that HTTP/2 allows: the control plane does not check them.
fn http2_params(message: proto::Http2ClientParams, on_incomplete: impl FnMut(DecodeError)) -> Http2Params {
    let non_zero = |value: u32| Some(value).filter(|value| *value > 0);
    let flow_control = message.flow_control.unwrap_or_default();
    let internals = message.internals.unwrap_or_default();
    Http2Params {
        connection_window: non_zero(flow_control.initial_connection_window_size).map(|size| size.min(MAX_WINDOW)),
        stream_window: non_zero(flow_control.initial_stream_window_size).map(|size| size.min(MAX_WINDOW)),
        keep_alive: message
            .keep_alive
            .and_then(|message| keep_alive(message).map_err(on_incomplete).ok()),
        max_concurrent_reset_streams: non_zero(internals.max_concurrent_reset_streams),
        max_frame_size: non_zero(internals.max_frame_size)
            .map(|size| size.clamp(*FRAME_SIZES.start(), *FRAME_SIZES.end())),
        max_send_buf_size: non_zero(internals.max_send_buf_size),
    }
}

/// # Errors
/// The interval or the timeout is missing, zero or invalid.
fn keep_alive(message: proto::http2_client_params::KeepAlive) -> Result<KeepAlive, DecodeError> {
    let above_zero = |field, message| {
        let duration = duration(field, message)?;
        match duration.is_zero() {
            true => Err(DecodeError::invalid(field, "0s", "more than 0")),
            false => Ok(duration),
        }
    };
    Ok(KeepAlive {
        interval: above_zero("HTTP/2 keep-alive interval of an endpoint", message.interval)?,
        timeout: above_zero("HTTP/2 keep-alive timeout of an endpoint", message.timeout)?,
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proto::protocol_hint::{H2, Opaque, OpaqueTransport, Protocol};
    use proto::tls_identity::{DnsLikeIdentity, Strategy, UriLikeIdentity};

    use super::*;

    fn address(port: u16) -> TcpAddress {
        SocketAddr::from(([10, 0, 0, 1], port)).into()
    }

    fn weighted(edit: impl FnOnce(&mut proto::WeightedAddr)) -> proto::WeightedAddr {
        let mut message = proto::WeightedAddr {
            addr: Some(address(80)),
            weight: 10_000,
            ..Default::default()
        };
        edit(&mut message);
        message
    }

    fn label(name: &str, value: &str) -> BTreeMap<String, String> {
        BTreeMap::from([(name.to_owned(), value.to_owned())])
    }

    fn decode_endpoint(edit: impl FnOnce(&mut proto::WeightedAddr)) -> EndpointSpec {
        endpoint(weighted(edit), &BTreeMap::new(), drop).unwrap()
    }

    #[test]
    fn labels_of_the_endpoint_override_those_of_the_set() {
        let mut set = label("zone", "a");
        set.extend(label("service", "web"));
        let spec = endpoint(weighted(|addr| addr.metric_labels = label("zone", "b")), &set, drop).unwrap();
        assert_eq!(spec.labels["zone"], "b");
        assert_eq!(spec.labels["service"], "web");
        assert_eq!((spec.weight.get(), spec.locality), (10_000, Locality::Unknown));
        for (value, expected) in [
            ("local", Locality::Local),
            ("remote", Locality::Remote),
            ("?", Locality::Unknown),
        ] {
            assert_eq!(
                decode_endpoint(|addr| addr.metric_labels = label("zone_locality", value)).locality,
                expected
            );
        }
    }

    #[test]
    fn endpoints_are_preferred_unless_they_are_fallback_endpoints() {
        for is_fallback in [false, true] {
            assert_eq!(
                decode_endpoint(|addr| addr.is_fallback = is_fallback).is_fallback.get(),
                is_fallback
            );
        }
    }

    #[test]
    fn an_endpoint_with_an_invalid_identity_or_server_name_is_refused() {
        let dns = |name: &str| Strategy::DnsLikeIdentity(DnsLikeIdentity { name: name.into() });
        let uri = |uri: &str| Strategy::UriLikeIdentity(UriLikeIdentity { uri: uri.into() });
        for (strategy, server_name, expected) in [
            (Some(dns("web.test")), None, Some(("web.test", "web.test"))),
            (Some(dns("web.test")), Some("sni.test"), Some(("web.test", "sni.test"))),
            (
                Some(uri("spiffe://root/web")),
                Some("web.test"),
                Some(("spiffe://root/web", "web.test")),
            ),
            (Some(uri("spiffe://root/web")), None, None),
            (Some(uri("web.test")), Some("web.test"), None),
            (Some(dns("spiffe://root/web")), None, None),
            (Some(dns("no name")), None, None),
            (Some(dns("")), None, None),
            (Some(dns("web.test")), Some("10.0.0.1"), None),
            (None, Some("web.test"), None),
        ] {
            let server_name = server_name.map(|name: &str| DnsLikeIdentity { name: name.into() });
            let message = proto::TlsIdentity { server_name, strategy };
            let found = endpoint(
                weighted(|addr| addr.tls_identity = Some(message.clone())),
                &BTreeMap::new(),
                drop,
            );
            let found = found.ok().map(|spec| spec.tls.expect("an identity"));
            let found = found.as_ref().map(|tls| (tls.identity.as_str(), &*tls.server_name));
            assert_eq!(found, expected, "{message:?}");
        }
    }

    #[test]
    fn protocol_hints_are_decoded() {
        let hint = |protocol, port: Option<u32>| {
            let opaque_transport = port.map(|inbound_port| OpaqueTransport { inbound_port });
            let spec = decode_endpoint(|addr| {
                addr.protocol_hint = Some(proto::ProtocolHint {
                    opaque_transport,
                    protocol,
                });
            });
            (spec.hint, spec.opaque_transport.map(NonZeroU16::get))
        };
        assert_eq!(
            hint(Some(Protocol::H2(H2 {})), Some(4143)),
            (ProtocolHint::H2, Some(4143))
        );
        assert_eq!(
            hint(Some(Protocol::Opaque(Opaque {})), None),
            (ProtocolHint::Opaque, None)
        );
        for (port, expected) in [(0, None), (65_534, Some(65_534)), (65_535, None), (65_536, None)] {
            assert_eq!(hint(None, Some(port)), (ProtocolHint::Unknown, expected), "{port}");
        }
    }

    #[test]
    fn http2_settings_and_the_authority_are_decoded() {
        let seconds = |seconds| Some(prost_types::Duration { seconds, nanos: 0 });
        let spec = decode_endpoint(|addr| {
            addr.http2 = Some(proto::Http2ClientParams {
                keep_alive: Some(proto::http2_client_params::KeepAlive {
                    interval: seconds(10),
                    timeout: seconds(3),
                    while_idle: true,
                }),
                ..Default::default()
            });
            addr.authority_override = Some(proto::AuthorityOverride {
                authority_override: "web:80".into(),
            });
        });
        let (interval, timeout) = (Duration::from_secs(10), Duration::from_secs(3));
        assert_eq!(spec.http2.keep_alive, Some(KeepAlive { interval, timeout }));
        assert_eq!(spec.http2.stream_window, None);
        assert_eq!(spec.authority_override.unwrap(), "web:80");
        let spec = decode_endpoint(|addr| addr.authority_override = Some(proto::AuthorityOverride::default()));
        assert_eq!((spec.http2.keep_alive, spec.authority_override), (None, None));
    }

    #[test]
    fn incomplete_keep_alive_settings_are_reported_and_the_endpoint_is_used() {
        let seconds = |seconds| Some(prost_types::Duration { seconds, nanos: 0 });
        for (interval, timeout, expected) in [
            (seconds(10), seconds(3), None),
            (
                None,
                seconds(3),
                Some("HTTP/2 keep-alive interval of an endpoint is missing"),
            ),
            (
                seconds(10),
                None,
                Some("HTTP/2 keep-alive timeout of an endpoint is missing"),
            ),
            (None, None, Some("HTTP/2 keep-alive interval of an endpoint is missing")),
            (
                seconds(0),
                seconds(3),
                Some("HTTP/2 keep-alive interval of an endpoint is \"0s\"; expected more than 0"),
            ),
            (
                seconds(10),
                seconds(0),
                Some("HTTP/2 keep-alive timeout of an endpoint is \"0s\"; expected more than 0"),
            ),
            (
                seconds(10),
                seconds(-1),
                Some("invalid HTTP/2 keep-alive timeout of an endpoint"),
            ),
        ] {
            let addr = weighted(|addr| {
                addr.http2 = Some(proto::Http2ClientParams {
                    keep_alive: Some(proto::http2_client_params::KeepAlive {
                        interval,
                        timeout,
                        while_idle: true,
                    }),
                    ..Default::default()
                });
            });
            let set = proto::WeightedAddrSet {
                addrs: vec![addr],
                ..Default::default()
            };
            let update = proto::Update {
                update: Some(proto::update::Update::Add(set)),
            };
            let mut reasons = Vec::new();
            let Ok(EndpointUpdate::Add(specs)) = endpoint_update(update, |error| reasons.push(error.to_string()))
            else {
                panic!()
            };
            assert_eq!(specs.len(), 1);
            assert_eq!(specs[0].http2.keep_alive.is_some(), expected.is_none());
            assert_eq!(reasons, Vec::from_iter(expected));
        }
    }

    #[test]
    fn http2_settings_are_limited_to_the_ranges_of_http2() {
        for (size, window, frame) in [
            (0, None, None),
            (100, Some(100), Some(16_384)),
            (70_000, Some(70_000), Some(70_000)),
            (u32::MAX, Some(2_147_483_647), Some(16_777_215)),
        ] {
            let spec = decode_endpoint(|addr| {
                addr.http2 = Some(proto::Http2ClientParams {
                    flow_control: Some(proto::http2_client_params::FlowControl {
                        initial_connection_window_size: size,
                        initial_stream_window_size: size,
                        ..Default::default()
                    }),
                    internals: Some(proto::http2_client_params::Internals {
                        max_frame_size: size,
                        ..Default::default()
                    }),
                    ..Default::default()
                });
            });
            let windows = (spec.http2.connection_window, spec.http2.stream_window);
            assert_eq!(
                (windows, spec.http2.max_frame_size),
                ((window, window), frame),
                "{size}"
            );
        }
    }

    #[test]
    fn an_invalid_endpoint_does_not_remove_the_others() {
        let bad = [
            None,
            Some(TcpAddress { ip: None, port: 80 }),
            Some(TcpAddress {
                port: 65_536,
                ..address(80)
            }),
            Some(address(0)),
            Some(SocketAddr::from(([169, 254, 169, 254], 80)).into()),
        ];
        let mut addrs: Vec<_> = bad
            .into_iter()
            .map(|addr| proto::WeightedAddr {
                addr,
                ..weighted(|_| ())
            })
            .collect();
        addrs.push(weighted(|addr| addr.tls_identity = Some(proto::TlsIdentity::default())));
        addrs.push(weighted(|addr| {
            addr.authority_override = Some(proto::AuthorityOverride {
                authority_override: "no name".into(),
            });
        }));
        addrs.push(weighted(|_| ()));
        let set = proto::WeightedAddrSet {
            addrs,
            ..Default::default()
        };
        let update = proto::Update {
            update: Some(proto::update::Update::Add(set)),
        };
        let mut reasons = Vec::new();
        let Ok(EndpointUpdate::Add(specs)) = endpoint_update(update, |error| reasons.push(error.to_string())) else {
            panic!()
        };
        assert_eq!(reasons.len(), 7, "{reasons:?}");
        assert_eq!(specs.iter().map(|spec| spec.addr.port()).collect::<Vec<_>>(), [80]);
    }

    #[test]
    fn removals_and_empty_services_are_decoded() {
        let set = proto::AddrSet {
            addrs: vec![address(80), address(0)],
        };
        let update = proto::Update {
            update: Some(proto::update::Update::Remove(set)),
        };
        assert_eq!(
            endpoint_update(update, |_| ()).unwrap(),
            EndpointUpdate::Remove(vec![([10, 0, 0, 1], 80).into()])
        );
        for exists in [true, false] {
            let none = proto::update::Update::NoEndpoints(proto::NoEndpoints { exists });
            let update = proto::Update { update: Some(none) };
            assert_eq!(endpoint_update(update, |_| ()).unwrap(), EndpointUpdate::NoEndpoints);
        }
        assert!(endpoint_update(proto::Update { update: None }, |_| ()).is_err());
    }
}
