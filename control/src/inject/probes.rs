//! Probes that a sidecar in between would falsify or refuse: the proxy makes them in the kubelet's place.
//!
//! A connection of the kubelet ends at the proxy, which accepts it whether the application listens or not; a `grpc` or HTTPS
//! probe cannot be permitted where a policy denies other requests. So these probes ask the proxy's admin port, and a variable
//! of the proxy declares what they were. Plain `httpGet` probes stay as they are: the policy of their port permits them.

use std::num::{NonZeroU16, NonZeroU32};

use http::uri::Authority;
use http::{HeaderName, HeaderValue};
use k8s_openapi::api::core::v1::{Container, ContainerPort, HTTPGetAction, PodSpec, Probe};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde_json::{Map, Value};
use tulle_core::names;
use tulle_core::probes::{DeclaredProbe, Handler, Header, Kind, Port, Scheme};

use crate::inject::PROXY_CONTAINER;
use crate::inject::values::Values;

/// A probe that asks the proxy, and what it was.
pub(super) struct Rewritten {
    /// The list of the container in the spec, and its index there.
    pub(super) list: &'static str,
    pub(super) index: usize,
    pub(super) declared: DeclaredProbe,
}

/// The probes of a pod that the proxy makes.
pub(super) fn rewritten(values: &Values, spec: &PodSpec) -> Vec<Rewritten> {
    if !values.proxy.rewrite_probes || is_of_linkerd(values) {
        return Vec::new();
    }
    let containers = spec.containers.iter().enumerate();
    let init_containers = spec.init_containers.iter().flatten().enumerate();
    let all = containers.map(|(index, container)| ("containers", index, container));
    let all = all.chain(init_containers.map(|(index, container)| ("initContainers", index, container)));
    let mut rewritten = Vec::new();
    for (list, index, container) in all {
        for kind in Kind::ALL {
            // A classic sidecar starts after all init containers: until then nobody would answer these, and the pod would
            // never get on. A pod whose proxy is not there is not ready, whatever its other containers say.
            let is_early = list == "initContainers" && !values.proxy.native_sidecar;
            if is_early && kind != Kind::Readiness {
                continue;
            }
            let declared = probe(container, kind).and_then(|probe| declare(container, kind, probe));
            rewritten.extend(declared.map(|declared| Rewritten { list, index, declared }));
        }
    }
    rewritten
}

/// The value of the proxy's variable; none where it makes no probes.
pub(super) fn variable(rewritten: &[Rewritten]) -> Option<String> {
    let declared: Vec<_> = rewritten.iter().map(|one| &one.declared).collect();
    let json = serde_json::to_string(&declared).ok().filter(|_| !declared.is_empty())?;
    // The kubelet would take `$(name)` for a variable.
    Some(json.replace('$', "\\u0024"))
}

/// What a rewritten probe asks.
pub(super) fn asking(values: &Values, declared: &DeclaredProbe) -> HTTPGetAction {
    HTTPGetAction {
        path: Some(declared.path()),
        port: IntOrString::Int(values.proxy.ports.admin.into()),
        ..HTTPGetAction::default()
    }
}

/// Gives the probes of a pod's spec back what they were; the spec still has its proxy, whose variable says that.
pub fn restore(spec: &mut Map<String, Value>) {
    let declared = declared(spec);
    for list in LISTS {
        let containers = spec.get_mut(list).and_then(Value::as_array_mut);
        for container in containers.into_iter().flatten() {
            let of_container = declared.iter().filter(|one| container["name"] == *one.container);
            for one in of_container.collect::<Vec<_>>() {
                let probe = container.get_mut(one.probe.field()).and_then(Value::as_object_mut);
                let asks =
                    |probe: &Map<String, Value>| probe.get("httpGet").is_some_and(|get| get["path"] == *one.path());
                if let Some(probe) = probe.filter(|probe| asks(probe))
                    && let Ok(Value::Object(handler)) = serde_json::to_value(&one.handler)
                {
                    probe.remove("httpGet");
                    probe.extend(handler);
                }
            }
        }
    }
}

/// What the proxy of a pod's spec makes.
fn declared(spec: &Map<String, Value>) -> Vec<DeclaredProbe> {
    let containers = LISTS.iter().filter_map(|list| spec.get(*list)?.as_array());
    let mut proxies = containers
        .flatten()
        .filter(|container| container["name"] == PROXY_CONTAINER);
    let variables = proxies.next().and_then(|proxy| proxy["env"].as_array());
    let mut variables = variables.into_iter().flatten();
    let found = variables.find(|variable| variable["name"] == names::probes::VARIABLE);
    let declared = found.and_then(|variable| serde_json::from_str(variable["value"].as_str()?).ok());
    declared.unwrap_or_default()
}

fn probe(container: &Container, kind: Kind) -> Option<&Probe> {
    let probe = match kind {
        Kind::Startup => &container.startup_probe,
        Kind::Readiness => &container.readiness_probe,
        Kind::Liveness => &container.liveness_probe,
    };
    probe.as_ref()
}

/// What the proxy is to do; none for probes that stay with the kubelet: other kinds, those of another host, and those that the
/// kubelet cannot make either.
fn declare(container: &Container, kind: Kind, probe: &Probe) -> Option<DeclaredProbe> {
    let is_elsewhere = |host: &Option<String>| host.as_ref().is_some_and(|host| !host.is_empty());
    let (port, handler) = if let Some(tcp) = &probe.tcp_socket
        && !is_elsewhere(&tcp.host)
    {
        let port = port_number(container, &tcp.port)?;
        (
            port,
            Handler::TcpSocket {
                port: as_declared(&tcp.port)?,
            },
        )
    } else if let Some(grpc) = &probe.grpc {
        let port = u16::try_from(grpc.port).ok().and_then(NonZeroU16::new)?;
        let service = grpc.service.clone().filter(|service| !service.is_empty());
        (port, Handler::Grpc { port, service })
    } else if let Some(get) = &probe.http_get
        && get.scheme.as_deref() == Some("HTTPS")
        && !is_elsewhere(&get.host)
    {
        (port_number(container, &get.port)?, https(get)?)
    } else {
        return None;
    };
    let timeout = probe.timeout_seconds.and_then(|seconds| u32::try_from(seconds).ok());
    Some(DeclaredProbe {
        container: container.name.clone(),
        probe: kind,
        port,
        // One second is the API's default.
        timeout_seconds: timeout.and_then(NonZeroU32::new).unwrap_or(NonZeroU32::MIN),
        handler,
    })
}

fn https(get: &HTTPGetAction) -> Option<Handler> {
    let headers = get.http_headers.iter().flatten();
    let is_sendable = |name: &str, value: &str| {
        let is_host = name.eq_ignore_ascii_case("host");
        name.parse::<HeaderName>().is_ok()
            && HeaderValue::from_bytes(value.as_bytes()).is_ok()
            && (!is_host || value.parse::<Authority>().is_ok())
    };
    let is_short = get.path.as_ref().is_none_or(|path| path.len() <= MAX_PATH);
    let is_usable = is_short && headers.clone().all(|header| is_sendable(&header.name, &header.value));
    is_usable.then_some(())?;
    Some(Handler::HttpGet {
        path: get.path.clone(),
        port: as_declared(&get.port)?,
        scheme: Scheme::Https,
        http_headers: headers
            .map(|header| Header {
                name: header.name.clone(),
                value: header.value.clone(),
            })
            .collect(),
    })
}

/// The number of a port, which may be the name of one of the same container's.
fn port_number(container: &Container, port: &IntOrString) -> Option<NonZeroU16> {
    let number = match port {
        IntOrString::Int(number) => *number,
        IntOrString::String(name) => {
            let is_named = |port: &&ContainerPort| port.name.as_ref() == Some(name);
            let named = container.ports.iter().flatten().find(is_named);
            named.map_or_else(|| name.parse().ok(), |port| Some(port.container_port))?
        }
    };
    u16::try_from(number).ok().and_then(NonZeroU16::new)
}

fn as_declared(port: &IntOrString) -> Option<Port> {
    match port {
        IntOrString::Int(number) => Some(Port::Number(u16::try_from(*number).ok().and_then(NonZeroU16::new)?)),
        IntOrString::String(name) => Some(Port::Name(name.clone())),
    }
}

/// Linkerd's own proxy makes no probes.
fn is_of_linkerd(values: &Values) -> bool {
    values.proxy.image.name.ends_with("linkerd/proxy")
}

/// The lists of a spec that have containers.
const LISTS: [&str; 2] = ["containers", "initContainers"];
/// In bytes; a longer one stays with the kubelet, as it may be too long for a request once it is escaped.
const MAX_PATH: usize = 16 * 1024;
