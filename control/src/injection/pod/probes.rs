//! Rewrites probes that a sidecar would break.
//!
//! A `tcpSocket` probe would succeed even if the application does not listen, because the proxy accepts the connection. A
//! policy cannot permit `grpc` and HTTPS probes without permitting other requests. These three kinds of probes are sent to the
//! proxy's admin port, and the proxy executes the original probe, which `TULLE_PROXY_PROBES` contains. Plain `httpGet` probes
//! are unchanged: the policy of their port permits them.

use std::num::{NonZeroU16, NonZeroU32};

use http::uri::Authority;
use http::{HeaderName, HeaderValue};
use k8s_openapi::api::core::v1::{Container, ContainerPort, HTTPGetAction, PodSpec, Probe};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde_json::{Map, Value};
use tulle_core::names;
use tulle_core::probes::{Handler, Header, Kind, OriginalProbe, Port, Scheme};

use crate::injection::target::PROXY_CONTAINER;
use crate::injection::values::Values;

/// A probe that is sent to the proxy, with the original probe.
pub(in crate::injection) struct RewrittenProbe {
    /// The list in the spec that has the container, and the index in it.
    pub(in crate::injection) list: &'static str,
    pub(in crate::injection) index: usize,
    pub(in crate::injection) original: OriginalProbe,
}

/// Finds the probes of a pod that are sent to the proxy instead.
pub(in crate::injection) fn probes_to_rewrite(values: &Values, spec: &PodSpec) -> Vec<RewrittenProbe> {
    if !values.proxy.rewrite_probes || uses_linkerd_image(values) {
        return Vec::new();
    }
    let containers = spec.containers.iter().enumerate();
    let init_containers = spec.init_containers.iter().flatten().enumerate();
    let all = containers.map(|(index, container)| ("containers", index, container));
    let all = all.chain(init_containers.map(|(index, container)| ("initContainers", index, container)));
    let mut rewritten_probes = Vec::new();
    for (list, index, container) in all {
        for kind in Kind::ALL {
            // A sidecar that is not native starts after all init containers. If it had to answer their startup and liveness
            // probes, the pod would never start. Readiness probes may fail until the proxy runs, because the pod is not ready
            // earlier.
            let is_early = list == "initContainers" && !values.proxy.native_sidecar;
            if is_early && kind != Kind::Readiness {
                continue;
            }
            let original = probe(container, kind).and_then(|probe| to_original_probe(container, kind, probe));
            rewritten_probes.extend(original.map(|original| RewrittenProbe { list, index, original }));
        }
    }
    rewritten_probes
}

/// Value of the variable `TULLE_PROXY_PROBES`; `None` without rewritten probes.
pub(in crate::injection) fn original_probes_variable(rewritten_probes: &[RewrittenProbe]) -> Option<String> {
    let originals: Vec<_> = rewritten_probes.iter().map(|rewritten| &rewritten.original).collect();
    let json = serde_json::to_string(&originals)
        .ok()
        .filter(|_| !originals.is_empty())?;
    // The kubelet expands `$(name)` in values of variables.
    Some(json.replace('$', "\\u0024"))
}

/// The request of a rewritten probe to the proxy.
pub(in crate::injection) fn probe_action(values: &Values, original: &OriginalProbe) -> HTTPGetAction {
    HTTPGetAction {
        path: Some(original.path()),
        port: IntOrString::Int(values.proxy.ports.admin.into()),
        ..HTTPGetAction::default()
    }
}

/// Restores the original probes of a pod's spec from the variable of its proxy container.
pub fn restore_probes(spec: &mut Map<String, Value>) {
    let originals = original_probes(spec);
    for list in CONTAINER_LISTS {
        let containers = spec.get_mut(list).and_then(Value::as_array_mut);
        for container in containers.into_iter().flatten() {
            let matching = originals
                .iter()
                .filter(|original| container["name"] == *original.container);
            for original in matching.collect::<Vec<_>>() {
                let probe = container.get_mut(original.kind.field()).and_then(Value::as_object_mut);
                let calls_proxy = |probe: &Map<String, Value>| {
                    probe.get("httpGet").is_some_and(|get| get["path"] == *original.path())
                };
                if let Some(probe) = probe.filter(|probe| calls_proxy(probe))
                    && let Ok(Value::Object(handler)) = serde_json::to_value(&original.handler)
                {
                    probe.remove("httpGet");
                    probe.extend(handler);
                }
            }
        }
    }
}

/// The original probes that the proxy container of a pod's spec declares.
fn original_probes(spec: &Map<String, Value>) -> Vec<OriginalProbe> {
    let containers = CONTAINER_LISTS.iter().filter_map(|list| spec.get(*list)?.as_array());
    let mut proxies = containers
        .flatten()
        .filter(|container| container["name"] == PROXY_CONTAINER);
    let variables = proxies.next().and_then(|proxy| proxy["env"].as_array());
    let mut variables = variables.into_iter().flatten();
    let found = variables.find(|variable| variable["name"] == names::probes::VARIABLE);
    let originals = found.and_then(|variable| serde_json::from_str(variable["value"].as_str()?).ok());
    originals.unwrap_or_default()
}

fn probe(container: &Container, kind: Kind) -> Option<&Probe> {
    let probe = match kind {
        Kind::Startup => &container.startup_probe,
        Kind::Readiness => &container.readiness_probe,
        Kind::Liveness => &container.liveness_probe,
    };
    probe.as_ref()
}

/// The original probe, as the proxy executes it. `None` for probes that the kubelet still executes: other handlers (`exec`, plain
/// `httpGet`), probes of another host, and invalid probes.
fn to_original_probe(container: &Container, kind: Kind, probe: &Probe) -> Option<OriginalProbe> {
    let has_other_host = |host: &Option<String>| host.as_ref().is_some_and(|host| !host.is_empty());
    let (port, handler) = if let Some(tcp) = &probe.tcp_socket
        && !has_other_host(&tcp.host)
    {
        let port = port_number(container, &tcp.port)?;
        (
            port,
            Handler::TcpSocket {
                port: to_port(&tcp.port)?,
            },
        )
    } else if let Some(grpc) = &probe.grpc {
        let port = u16::try_from(grpc.port).ok().and_then(NonZeroU16::new)?;
        let service = grpc.service.clone().filter(|service| !service.is_empty());
        (port, Handler::Grpc { port, service })
    } else if let Some(get) = &probe.http_get
        && get.scheme.as_deref() == Some("HTTPS")
        && !has_other_host(&get.host)
    {
        (port_number(container, &get.port)?, https_handler(get)?)
    } else {
        return None;
    };
    let timeout = probe.timeout_seconds.and_then(|seconds| u32::try_from(seconds).ok());
    Some(OriginalProbe {
        container: container.name.clone(),
        kind,
        port,
        // The API's default is 1 s.
        timeout_seconds: timeout.and_then(NonZeroU32::new).unwrap_or(NonZeroU32::MIN),
        handler,
    })
}

fn https_handler(get: &HTTPGetAction) -> Option<Handler> {
    let headers = get.http_headers.iter().flatten();
    let is_sendable = |name: &str, value: &str| {
        let is_host = name.eq_ignore_ascii_case("host");
        name.parse::<HeaderName>().is_ok()
            && HeaderValue::from_bytes(value.as_bytes()).is_ok()
            && (!is_host || value.parse::<Authority>().is_ok())
    };
    let is_short = get.path.as_ref().is_none_or(|path| path.len() <= MAX_PATH_BYTES);
    let is_usable = is_short && headers.clone().all(|header| is_sendable(&header.name, &header.value));
    is_usable.then_some(())?;
    Some(Handler::HttpGet {
        path: get.path.clone(),
        port: to_port(&get.port)?,
        scheme: Scheme::Https,
        http_headers: headers
            .map(|header| Header {
                name: header.name.clone(),
                value: header.value.clone(),
            })
            .collect(),
    })
}

/// The number of a port. A name refers to a port of the same container.
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

fn to_port(port: &IntOrString) -> Option<Port> {
    match port {
        IntOrString::Int(number) => Some(Port::Number(u16::try_from(*number).ok().and_then(NonZeroU16::new)?)),
        IntOrString::String(name) => Some(Port::Name(name.clone())),
    }
}

/// Whether the image is Linkerd's proxy, which cannot execute probes.
fn uses_linkerd_image(values: &Values) -> bool {
    values.proxy.image.name.ends_with("linkerd/proxy")
}

/// The fields of a pod spec that list containers.
const CONTAINER_LISTS: [&str; 2] = ["containers", "initContainers"];
/// Maximum length of a path that the proxy requests. A longer path could be too long for a request after percent-encoding, so the
/// kubelet executes its probe.
const MAX_PATH_BYTES: usize = 16 * 1024;
