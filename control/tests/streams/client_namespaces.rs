//! Tests that the client namespace in a request has to be that of the client's certificate.

use std::net::Ipv4Addr;

use tonic::{Code, Request, Status};
use tulle_control::grpc::Caller;
use tulle_control::tls::mesh_credentials::ClientCertificates;
use tulle_control::{destination, policy};
use tulle_proto::destination::GetDestination;
use tulle_proto::destination::destination_client::DestinationClient;
use tulle_proto::outbound::outbound_policies_client::OutboundPoliciesClient;
use tulle_proto::outbound::{TrafficSpec, traffic_spec};

use crate::harness::{Mesh, mesh, with_timeout};

const MANIFESTS: &str = "
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {clusterIP: 10.247.0.10, selector: {app: web}, ports: [{port: 80, targetPort: 8080}]}
---
apiVersion: workload.linkerd.io/v1beta1
kind: ExternalWorkload
metadata: {name: vm, namespace: vms}
spec:
  meshTLS: {identity: 'spiffe://example.org/vm', serverName: vm.example.org}
  workloadIPs: [{ip: 10.77.0.11}]
  ports: [{name: http, port: 8080}]
";

/// The identity of a client in namespace `shop`, whose pod the control plane does not know.
const POD: &[&str] = &["new.shop.serviceaccount.identity.linkerd.cluster.local"];
const MACHINE: &[&str] = &["spiffe://example.org/vm"];
const UNKNOWN_MACHINE: &[&str] = &["spiffe://example.org/other"];

fn peer(identities: &[&str]) -> Option<Caller> {
    let identities = identities.iter().map(|identity| identity.parse().unwrap());
    Some(Caller::Peer {
        ip: Ipv4Addr::new(10, 1, 0, 9).into(),
        identities: identities.collect(),
    })
}

fn request<T>(message: T, caller: Option<&Caller>) -> Request<T> {
    let mut request = Request::new(message);
    if let Some(caller) = caller {
        request.extensions_mut().insert(caller.clone());
    }
    request
}

fn get(context_token: &str) -> GetDestination {
    GetDestination {
        path: WEB.to_owned(),
        context_token: context_token.to_owned(),
        ..GetDestination::default()
    }
}

/// Returns the results of Get and GetProfile with a context token.
async fn destinations(
    mesh: &Mesh,
    certificates: ClientCertificates,
    caller: Option<&Caller>,
    token: &str,
) -> [Result<(), Status>; 2] {
    let config = destination::config::Config::default();
    let mut client = DestinationClient::new(destination::server(mesh.cluster.clone(), certificates, config));
    let endpoints = with_timeout(client.get(request(get(token), caller))).await;
    let profile = with_timeout(client.get_profile(request(get(token), caller))).await;
    [endpoints.map(drop), profile.map(drop)]
}

/// Returns the results of Get and Watch with a source workload.
async fn policies(
    mesh: &Mesh,
    certificates: ClientCertificates,
    caller: Option<&Caller>,
    workload: &str,
) -> [Result<(), Status>; 2] {
    let config = policy::config::Config::default();
    let mut client = OutboundPoliciesClient::new(policy::outbound_server(mesh.cluster.clone(), certificates, config));
    let spec = || TrafficSpec {
        source_workload: workload.to_owned(),
        target: Some(traffic_spec::Target::Authority(WEB.to_owned())),
    };
    let policy = with_timeout(client.get(request(spec(), caller))).await;
    let policies = with_timeout(client.watch(request(spec(), caller))).await;
    [policy.map(drop), policies.map(drop)]
}

fn check(what: &str, results: [Result<(), Status>; 2], expected: Code) {
    let codes = results.map(|result| result.map_or_else(|status| status.code(), |()| Code::Ok));
    assert_eq!(codes, [expected; 2], "{what}");
}

#[tokio::test]
async fn a_client_can_name_only_its_own_namespace() {
    use ClientCertificates::{Optional, Required};

    let mesh = mesh(MANIFESTS).await;
    for (certificates, caller, namespace, expected) in [
        (Required, peer(POD), "shop", Code::Ok),
        (Required, peer(POD), "vms", Code::PermissionDenied),
        (Required, peer(MACHINE), "vms", Code::Ok),
        (Required, peer(MACHINE), "shop", Code::PermissionDenied),
        (Required, peer(UNKNOWN_MACHINE), "vms", Code::PermissionDenied),
        (Required, peer(&[]), "shop", Code::PermissionDenied),
        (Required, None, "shop", Code::PermissionDenied),
        (Required, Some(Caller::ThisMachine), "shop", Code::Ok),
        (Optional, peer(POD), "vms", Code::Ok),
        (Optional, peer(&[]), "shop", Code::Ok),
        (Optional, None, "shop", Code::Ok),
    ] {
        let (caller, what) = (caller.as_ref(), format!("{certificates:?} {caller:?} {namespace}"));
        for token in [format!(r#"{{"ns":"{namespace}"}}"#), format!("ns:{namespace}")] {
            check(&what, destinations(&mesh, certificates, caller, &token).await, expected);
        }
        for workload in [
            format!(r#"{{"ns":"{namespace}","pod":"new-0"}}"#),
            format!(r#"{{"ns":"{namespace}","external_workload":"vm"}}"#),
            format!("{namespace}:new-0"),
        ] {
            check(&what, policies(&mesh, certificates, caller, &workload).await, expected);
        }
    }
}

#[tokio::test]
async fn a_context_token_without_a_namespace_is_served_to_any_client() {
    let mesh = mesh(MANIFESTS).await;
    for caller in [peer(POD), peer(UNKNOWN_MACHINE), Some(Caller::ThisMachine)] {
        for token in ["", r#"{"nodeName":"node-a"}"#, "invalid"] {
            let results = destinations(&mesh, ClientCertificates::Required, caller.as_ref(), token).await;
            check(&format!("{caller:?} {token}"), results, Code::Ok);
        }
    }
}

#[tokio::test]
async fn a_refusal_names_the_namespace_the_certificate_and_the_permitted_identities() {
    let mesh = mesh(MANIFESTS).await;
    let (caller, required) = (peer(POD), ClientCertificates::Required);
    let [endpoints, profile] = destinations(&mesh, required, caller.as_ref(), r#"{"ns":"vms"}"#).await;
    let [policy, policies] = policies(&mesh, required, caller.as_ref(), "vms:vm").await;
    for refused in [endpoints, profile, policy, policies] {
        let refused = refused.unwrap_err();
        for part in [
            "in namespace vms",
            "<service account>.vms.serviceaccount.identity.linkerd.cluster.local",
            "an ExternalWorkload in this namespace",
            POD[0],
        ] {
            assert!(refused.message().contains(part), "{part}: {refused:?}");
        }
    }
}

const WEB: &str = "web.shop.svc.cluster.local:80";
