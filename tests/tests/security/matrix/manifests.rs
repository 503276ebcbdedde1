//! The manifests of each policy.

use super::table::Policy;
use super::testbed::{OUTSIDE, identity, v6};

/// The workload and the objects that policies refer to, without the policies of ports.
pub(super) fn workload() -> String {
    let (server, client) = (identity("server"), identity("client"));
    let network = client_networks();
    format!(
        "\
apiVersion: workload.linkerd.io/v1beta1
kind: ExternalWorkload
metadata: {{name: server, namespace: shop, labels: {{app: server}}}}
spec:
  meshTLS: {{identity: {server}, serverName: {server}}}
  workloadIPs: [{{ip: 10.79.0.20}}, {{ip: \"fd79::20\"}}]
---
apiVersion: policy.linkerd.io/v1alpha1
kind: MeshTLSAuthentication
metadata: {{name: client, namespace: shop}}
spec: {{identities: [{client}]}}
---
apiVersion: policy.linkerd.io/v1alpha1
kind: NetworkAuthentication
metadata: {{name: network, namespace: shop}}
spec: {{networks: {network}}}
---
apiVersion: policy.linkerd.io/v1alpha1
kind: NetworkAuthentication
metadata: {{name: other-network, namespace: shop}}
spec: {{networks: [{{cidr: 10.80.0.0/16}}, {{cidr: \"fd80::/64\"}}]}}
"
    )
}

/// The manifests of a policy for one port of the server.
pub(super) fn policy(policy: Policy, port: u16) -> String {
    let name = format!("{policy}-{port}");
    let server = |protocol: &str, access: &str| {
        format!(
            "\
apiVersion: policy.linkerd.io/v1beta3
kind: Server
metadata: {{name: {name}, namespace: shop}}
spec:
  externalWorkloadSelector: {{matchLabels: {{app: server}}}}
  port: {port}
  proxyProtocol: {protocol}
{access}---
"
        )
    };
    let denying = |protocol: &str| server(protocol, "  accessPolicy: deny\n");
    let open = |protocol: &str| server(protocol, "  accessPolicy: all-unauthenticated\n");
    match policy {
        Policy::NoServer => String::new(),
        Policy::Server => server("unknown", ""),
        Policy::Deny => denying("unknown"),
        Policy::Audit => server("unknown", "  accessPolicy: audit\n"),
        Policy::ClusterAuthenticated => server("unknown", "  accessPolicy: cluster-authenticated\n"),
        Policy::ClusterUnauthenticated => server("unknown", "  accessPolicy: cluster-unauthenticated\n"),
        Policy::ServerAuthorization => denying("unknown") + &server_authorization(&name),
        Policy::ByIdentity => denying("unknown") + &authorization(&name, "Server", "MeshTLSAuthentication", "client"),
        Policy::ByNetwork => denying("unknown") + &authorization(&name, "Server", "NetworkAuthentication", "network"),
        Policy::ByOtherNetwork => {
            denying("unknown") + &authorization(&name, "Server", "NetworkAuthentication", "other-network")
        }
        Policy::OwnHttpRoute => {
            let authorization = authorization(&name, "HTTPRoute", "MeshTLSAuthentication", "client");
            denying("unknown") + &http_route(&name, "/own") + &authorization
        }
        Policy::OwnGrpcRoute => {
            let authorization = authorization(&name, "GRPCRoute", "MeshTLSAuthentication", "client");
            denying("gRPC") + &grpc_route(&name) + &authorization
        }
        Policy::OtherRoute => open("unknown") + &http_route(&name, "/other"),
        Policy::RateLimit => open("unknown") + &rate_limit(&name, "total: {requestsPerSecond: 1}"),
        Policy::IdentityRateLimit => {
            let client = "{requestsPerSecond: 1000, clientRefs: [{kind: ServiceAccount, name: client}]}";
            let limits = format!("identity: {{requestsPerSecond: 1}}\n  overrides: [{client}]");
            open("unknown") + &rate_limit(&name, &limits)
        }
        Policy::Http1 => open("HTTP/1"),
        Policy::Http2 => open("HTTP/2"),
        Policy::Opaque => denying("opaque") + &authorization(&name, "Server", "MeshTLSAuthentication", "client"),
        Policy::Tls => open("TLS"),
    }
}

/// It names the networks of its clients, because otherwise it would permit only clients in the networks of the cluster.
fn server_authorization(server: &str) -> String {
    let (client, networks) = (identity("client"), client_networks());
    format!(
        "\
apiVersion: policy.linkerd.io/v1beta1
kind: ServerAuthorization
metadata: {{name: {server}, namespace: shop}}
spec:
  server: {{name: {server}}}
  client: {{networks: {networks}, meshTLS: {{identities: [{client}]}}}}
---
"
    )
}

/// The addresses of the client of inbound cells.
fn client_networks() -> String {
    format!("[{{cidr: {OUTSIDE}/32}}, {{cidr: \"{}/128\"}}]", v6(OUTSIDE))
}

/// Permits the clients of an authentication to use the Server or route of this name.
fn authorization(name: &str, target: &str, authentication: &str, authentication_name: &str) -> String {
    let group = match target {
        "GRPCRoute" => "gateway.networking.k8s.io",
        _ => "policy.linkerd.io",
    };
    format!(
        "\
apiVersion: policy.linkerd.io/v1alpha1
kind: AuthorizationPolicy
metadata: {{name: {name}, namespace: shop}}
spec:
  targetRef: {{group: {group}, kind: {target}, name: {name}}}
  requiredAuthenticationRefs: [{{group: policy.linkerd.io, kind: {authentication}, name: {authentication_name}}}]
---
"
    )
}

fn http_route(server: &str, path: &str) -> String {
    format!(
        "\
apiVersion: policy.linkerd.io/v1beta3
kind: HTTPRoute
metadata: {{name: {server}, namespace: shop}}
spec:
  parentRefs: [{{group: policy.linkerd.io, kind: Server, name: {server}}}]
  rules: [{{matches: [{{path: {{type: PathPrefix, value: {path}}}}}]}}]
---
"
    )
}

fn grpc_route(server: &str) -> String {
    format!(
        "\
apiVersion: gateway.networking.k8s.io/v1
kind: GRPCRoute
metadata: {{name: {server}, namespace: shop}}
spec:
  parentRefs: [{{group: policy.linkerd.io, kind: Server, name: {server}}}]
  rules: [{{matches: [{{method: {{service: own, method: Call}}}}]}}]
---
"
    )
}

fn rate_limit(server: &str, limits: &str) -> String {
    format!(
        "\
apiVersion: policy.linkerd.io/v1alpha1
kind: HTTPLocalRateLimitPolicy
metadata: {{name: {server}, namespace: shop}}
spec:
  targetRef: {{group: policy.linkerd.io, kind: Server, name: {server}}}
  {limits}
---
"
    )
}
