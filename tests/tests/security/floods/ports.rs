//! The ports of the testbed, each with its well-behaved clients and its attackers.

use std::net::SocketAddr;

use tulle_control::tls::mesh_credentials::LeafWithKey;
use tulle_tests::credentials::{control_plane_identity, identity};

use super::attackers::Sources;
use super::clients::{self, GrpcClient, GrpcRequest, WellBehavedClient};
use super::held::{MeshedClient, MeshedHttp};
use super::testbed::{self, CONTROL, SERVER, Testbed, v6};
use super::tls_attackers::{self, TlsAttack, TlsBehaviour};

/// One port: the target of the flood, and the well-behaved clients.
#[derive(Clone)]
pub(crate) struct FloodedPort<'a> {
    pub(crate) name: &'static str,
    pub(crate) addr: SocketAddr,
    /// Ports of one group share a connection limit, or a well-behaved client, and are flooded one after another.
    pub(crate) serial_group: &'static str,
    pub(crate) clients: Vec<WellBehavedClient<'a>>,
    /// Clients whose connections are open before each flood.
    pub(crate) held: Vec<MeshedClient<'a>>,
    /// Attackers that use TLS.
    pub(crate) tls: Vec<TlsAttack>,
    pub(crate) sources: &'static [Sources],
}

impl<'a> FloodedPort<'a> {
    /// A port without attackers that use TLS, and without connections that are open before each flood.
    pub(crate) fn new(
        name: &'static str,
        serial_group: &'static str,
        addr: SocketAddr,
        clients: Vec<WellBehavedClient<'a>>,
    ) -> Self {
        Self {
            name,
            addr,
            serial_group,
            clients,
            held: Vec::new(),
            tls: Vec::new(),
            sources: Sources::ALL,
        }
    }
}

/// The ports of the sidecar of the server.
///
/// The port for explicit proxying is not flooded. By default there is none, and it listens on loopback only, so all its clients are
/// in the pod. They can use the outbound port as well, with which it shares the connection limit and the memory.
pub(crate) fn ports_of_the_sidecar(testbed: &Testbed) -> Vec<FloodedPort<'_>> {
    let client = &testbed.client;
    let at = |port: u16| SocketAddr::from((SERVER, port));
    let at6 = |port: u16| SocketAddr::from((v6(SERVER), port));
    let application = |addr| vec![WellBehavedClient::http(client, addr, "/", 200)];
    let admin = |name, addr| {
        let http = MeshedHttp {
            config: testbed.client_config(),
            server: testbed::server_name(identity("server")),
            prefix: Vec::new(),
            path: "/ready",
        };
        FloodedPort {
            held: vec![MeshedClient::http(client, addr, http)],
            tls: with_and_without_certificate(testbed, Testbed::attack_on_server("/live")),
            ..FloodedPort::new(name, "admin", addr, probes(testbed, addr))
        }
    };
    let tap_client = grpc_client(testbed, identity("server"), Some(&testbed.tap_leaf));
    let tap = |name, addr| {
        let observe = WellBehavedClient::grpc(client, addr, tap_client.clone(), GrpcRequest::Tap);
        let tapped = WellBehavedClient::http(client, at(testbed::HTTP), clients::TAPPED_PATH, 200);
        let attack = Testbed::attack_on_server("/io.linkerd.proxy.tap.Tap/Observe");
        FloodedPort {
            held: vec![MeshedClient::tap(client, addr, tap_client.clone(), tapped)],
            tls: with_and_without_certificate(testbed, attack),
            ..FloodedPort::new(name, "admin", addr, prepend(observe, probes(testbed, at(4191))))
        }
    };
    let inbound = |name, addr| FloodedPort {
        // The proxy ignores identities on this port, so a flood can end an idle connection of a meshed client. So the test holds
        // none.
        tls: with_and_without_certificate(testbed, Testbed::attack_on_server("/echo")),
        ..FloodedPort::new(name, "inbound", addr, application(addr))
    };
    let attack = Testbed::attack_on_server("/echo");
    let direct = FloodedPort {
        tls: vec![
            testbed::direct(testbed.with_certificate(&attack), tls_attackers::ON_HTTP2),
            testbed::direct(attack, &[TlsBehaviour::Silent]),
        ],
        ..FloodedPort::new(
            "4143, dialled directly",
            "inbound",
            at(4143),
            application(at(testbed::HTTP)),
        )
    };
    let outbound = |name, addr| {
        let to_client = WellBehavedClient::http(&testbed.server, (testbed::CLIENT, testbed::HTTP).into(), "/", 200);
        FloodedPort::new(name, "outbound", addr, vec![to_client])
    };
    vec![
        admin("4191, admin", at(4191)),
        admin("4191, by IPv6", at6(4191)),
        tap("4190, tap", at(4190)),
        from_two_hundred_addresses(tap("4190, by IPv6", at6(4190))),
        inbound("4143, by redirect", at(testbed::HTTP)),
        inbound("4143, by redirect of IPv6", at6(testbed::HTTP)),
        direct,
        outbound("4140, dialled directly", at(4140)),
        from_two_hundred_addresses(outbound("4140, by IPv6", at6(4140))),
    ]
}

pub(crate) fn ports_of_the_control_plane(testbed: &Testbed) -> Vec<FloodedPort<'_>> {
    let client = &testbed.client;
    let at = |port: u16| SocketAddr::from((CONTROL, port));
    let at6 = |port: u16| SocketAddr::from((v6(CONTROL), port));
    let new_proxy = grpc_client(testbed, control_plane_identity("linkerd-identity"), None);
    let proxy = grpc_client(
        testbed,
        control_plane_identity("linkerd-destination"),
        Some(&testbed.leaf),
    );
    let identity_port = |name, addr| {
        let certify = WellBehavedClient::grpc(client, addr, new_proxy.clone(), GrpcRequest::Certify);
        let path = "/io.linkerd.proxy.identity.Identity/Certify";
        FloodedPort {
            tls: vec![Testbed::attack_on_control_plane("linkerd-identity", path)],
            ..FloodedPort::new(name, "identity", addr, vec![certify])
        }
    };
    let destination = |name, addr| {
        let get = WellBehavedClient::grpc(client, addr, proxy.clone(), GrpcRequest::Destination);
        let held = MeshedClient::grpc(client, addr, proxy.clone(), GrpcRequest::Destination);
        let path = "/io.linkerd.proxy.destination.Destination/Get";
        let attack = Testbed::attack_on_control_plane("linkerd-destination", path);
        FloodedPort {
            held: vec![held],
            tls: with_and_without_certificate(testbed, attack),
            ..FloodedPort::new(name, "destination", addr, prepend(get, probes(testbed, at(9996))))
        }
    };
    let policy = |name, addr| {
        let watch = WellBehavedClient::grpc(client, addr, proxy.clone(), GrpcRequest::Policy);
        let held = MeshedClient::grpc(client, addr, proxy.clone(), GrpcRequest::Policy);
        let path = "/io.linkerd.proxy.inbound.InboundServerPolicies/WatchPort";
        let attack = Testbed::attack_on_control_plane("linkerd-destination", path);
        FloodedPort {
            held: vec![held],
            tls: with_and_without_certificate(testbed, attack),
            ..FloodedPort::new(name, "policy", addr, vec![watch])
        }
    };
    let admin = |name, serial_group, addr| FloodedPort::new(name, serial_group, addr, probes(testbed, addr));
    let telemetry = |name, addr| {
        let client = WellBehavedClient::http(&testbed.control, ([127, 0, 0, 1], 8089).into(), "/", 404);
        FloodedPort::new(name, "telemetry", addr, vec![client])
    };
    vec![
        identity_port("8080, identity", at(8080)),
        from_two_hundred_addresses(identity_port("8080, by IPv6", at6(8080))),
        destination("8086, destination", at(8086)),
        from_two_hundred_addresses(destination("8086, by IPv6", at6(8086))),
        policy("8090, policy", at(8090)),
        from_two_hundred_addresses(policy("8090, by IPv6", at6(8090))),
        admin("9990, admin of identity and policy", "9990", at(9990)),
        from_two_hundred_addresses(admin("9990, by IPv6", "9990", at6(9990))),
        admin("9996, admin of destination", "destination", at(9996)),
        from_two_hundred_addresses(admin("9996, by IPv6", "destination", at6(9996))),
        telemetry("8089, telemetry", at(8089)),
        from_two_hundred_addresses(telemetry("8089, by IPv6", at6(8089))),
    ]
}

/// The port, flooded only from two hundred addresses. This is sufficient for IPv6, because the address family only changes which
/// addresses count as one network.
pub(crate) fn from_two_hundred_addresses(port: FloodedPort<'_>) -> FloodedPort<'_> {
    FloodedPort {
        sources: &[Sources::TwoHundred],
        ..port
    }
}

fn probes(testbed: &Testbed, addr: SocketAddr) -> Vec<WellBehavedClient<'_>> {
    let get = |path| WellBehavedClient::http(&testbed.client, addr, path, 200);
    vec![get("/live"), get("/ready")]
}

fn grpc_client<'a>(testbed: &'a Testbed, server: String, leaf: Option<&'a LeafWithKey>) -> GrpcClient<'a> {
    GrpcClient {
        server,
        anchors: &testbed.anchors,
        leaf,
    }
}

/// The attack by clients with a certificate of the mesh, and the same attack without a certificate.
fn with_and_without_certificate(testbed: &Testbed, attack: TlsAttack) -> Vec<TlsAttack> {
    vec![testbed.with_certificate(&attack), attack]
}

pub(crate) fn prepend<'a>(
    first: WellBehavedClient<'a>,
    others: Vec<WellBehavedClient<'a>>,
) -> Vec<WellBehavedClient<'a>> {
    [first].into_iter().chain(others).collect()
}
