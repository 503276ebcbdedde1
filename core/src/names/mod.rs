//! Externally visible names and numbers (headers, ports, annotations, labels, environment variables), each defined once.
//!
//! Annotations, labels, headers and variables carry their documentation as data.

pub mod annotation;
pub mod header;
pub mod label;
pub mod variable;

/// The ALPN protocol of a TLS handshake that is followed by a transport header.
pub const TRANSPORT_ALPN: &[u8] = b"transport.l5d.io/v1";

/// The audience of identity tokens.
pub const TOKEN_AUDIENCE: &str = "identity.l5d.io";

/// The metadata key of every request to a SPIFFE Workload API; its value is `true`.
pub const WORKLOAD_API_METADATA: &str = "workload.spiffe.io";

/// The name of the policy by which the control plane tells a gateway that it does not serve a Service to other clusters.
pub const NOT_EXPORTED_POLICY: &str = "not-exported";

/// TCP ports of proxies and of the control plane.
pub mod port {
    /// The proxy's port for connections to its application.
    pub const INBOUND: u16 = 4143;
    /// The proxy's port for connections from its application.
    pub const OUTBOUND: u16 = 4140;
    /// The proxy's port for tap.
    pub const TAP: u16 = 4190;
    /// The proxy's port for metrics and probes.
    pub const ADMIN: u16 = 4191;
    /// The control plane's port for certificate signing.
    pub const IDENTITY: u16 = 8080;
    /// The control plane's port for endpoints and profiles.
    pub const DESTINATION: u16 = 8086;
    /// The control plane's port for policies.
    pub const POLICY: u16 = 8090;
    /// The control plane's port for telemetry.
    pub const TELEMETRY: u16 = 8089;
}

/// Probes of the application that the proxy executes for the kubelet.
pub mod probes {
    /// The proxy's environment variable with the probes, a JSON list of [`OriginalProbe`](crate::probes::OriginalProbe).
    pub const VARIABLE: &str = "TULLE_PROXY_PROBES";
    /// The path prefix of the probes on the proxy's admin server; `<container>/<startup|readiness|liveness>` follows.
    ///
    /// The kubelet calls these paths without an identity, as it calls `/live` and `/ready`.
    pub const PATH_PREFIX: &str = "/probes/";
}

/// The telemetry API of the control plane, an aggregated API of Kubernetes.
pub mod telemetry {
    pub const GROUP: &str = "telemetry.tulle.dev";
    pub const VERSION: &str = "v1alpha1";
    /// The name of its APIService object.
    pub const API_SERVICE: &str = "v1alpha1.telemetry.tulle.dev";
    /// Golden metrics of workloads.
    pub const WORKLOADS: &str = "workloads";
    /// Pairs of clients and servers.
    pub const EDGES: &str = "edges";
    /// Golden metrics of routes.
    pub const ROUTES: &str = "routes";
    /// A live stream of requests; supports watch only.
    pub const TAPS: &str = "taps";
}

/// Names of the multicluster extension.
pub mod multicluster {
    use crate::dns_names::is_dns_label;

    /// The Deployment and the account of the service mirror for all Links.
    pub const SERVICE_MIRROR: &str = "linkerd-service-mirror";
    /// The name of the port of a gateway that answers probes, and of the port of the Service through which another cluster sends
    /// them.
    pub const PROBE_PORT: &str = "mc-probe";

    /// The Service through which the controller of one Link probes the gateway. The chart creates it.
    pub fn probe_service_of_chart(link: &str) -> String {
        format!("probe-{link}")
    }

    /// The Service that the service mirror for all Links creates to probe the gateway of a Link. Its name differs from the chart's,
    /// because Helm does not replace a Service that it has not created. If this name is too long for a Service, it is the chart's.
    pub fn probe_service(link: &str) -> String {
        let name = format!("mirror-probe-{link}");
        match is_dns_label(&name) {
            true => name,
            false => probe_service_of_chart(link),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{annotation, header, label, multicluster, variable};

    #[test]
    fn names_are_unique_in_their_table() {
        let annotations = annotation::ALL.iter().map(|row| row.name);
        let labels = label::ALL.iter().map(|row| row.name);
        let headers = header::ALL.iter().map(|row| row.name);
        let variables = variable::ALL.iter().map(|row| row.name);
        for names in [
            Vec::from_iter(annotations),
            labels.collect(),
            headers.collect(),
            variables.collect(),
        ] {
            let mut seen = BTreeSet::new();
            let repeated: Vec<_> = names.iter().filter(|name| !seen.insert(**name)).collect();
            assert!(repeated.is_empty(), "more than once: {repeated:?}");
        }
    }

    #[test]
    fn a_probe_service_has_a_valid_name_that_is_not_that_of_the_chart_if_possible() {
        let long = "x".repeat(51);
        for (link, expected) in [
            ("east", "mirror-probe-east".to_owned()),
            (&long[1..], format!("mirror-probe-{}", &long[1..])),
            (&long, format!("probe-{long}")),
        ] {
            assert_eq!(multicluster::probe_service(link), expected);
        }
    }

    #[test]
    fn texts_are_cells_of_a_markdown_table() {
        let annotations = annotation::ALL
            .iter()
            .map(|row| vec![row.name, row.objects, row.values, row.default, row.meaning]);
        let labels = label::ALL
            .iter()
            .map(|row| vec![row.name, row.objects, row.set_by, row.meaning]);
        let headers = header::ALL
            .iter()
            .map(|row| vec![row.name, row.direction, row.values, row.meaning]);
        let variables = variable::ALL
            .iter()
            .map(|row| vec![row.name, row.programs, row.values, row.default, row.meaning]);
        for row in annotations.chain(labels).chain(headers).chain(variables) {
            for text in &row {
                assert!(!text.is_empty(), "{row:?} has an empty text");
                assert!(!text.contains(['|', '\n']), "{text:?} would end its cell");
            }
            let meaning = row.last().unwrap();
            assert!(meaning.ends_with('.'), "{meaning:?} is no sentence");
        }
    }

    #[test]
    fn every_name_is_declared_in_its_table() {
        for (source, others) in [
            (include_str!("annotation.rs"), [].as_slice()),
            (include_str!("label.rs"), &[]),
            (include_str!("header.rs"), &["CREDENTIALS:"]),
            (include_str!("variable.rs"), &[]),
        ] {
            let constants = source.lines().filter_map(|line| line.strip_prefix("pub const "));
            let undocumented: Vec<_> = constants
                .filter(|constant| !others.iter().any(|other| constant.starts_with(other)))
                .collect();
            assert!(undocumented.is_empty(), "move them to the table: {undocumented:?}");
        }
    }
}
