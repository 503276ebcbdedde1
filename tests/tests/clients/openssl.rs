//! `openssl s_client` and `openssl s_server`.

use std::net::SocketAddr;
use std::sync::Arc;

use tulle_bench::run::process::Process;
use tulle_core::netns::Namespace;
use tulle_tests::credentials::Leaf;
use tulle_tests::hosts;
use tulle_tests::programs::find;

use crate::programs::{self, ProgramOutput};
use crate::testbed::Testbed;

/// One connection of `openssl s_client`.
#[derive(Clone, Copy)]
pub(crate) struct Client<'a> {
    pub(crate) to: SocketAddr,
    /// The requested server name.
    pub(crate) name: &'a str,
    pub(crate) alpn: Option<&'a str>,
    /// The client certificate.
    pub(crate) certificate: Option<&'a Leaf>,
}

impl Client<'_> {
    /// Performs the handshake, sends `input`, and reads until the server closes the connection.
    pub(crate) fn connect_and_send(&self, host: &Namespace, input: &[u8]) -> ProgramOutput {
        let to = self.to.to_string();
        let mut args = vec!["s_client", "-connect", &to, "-servername", self.name, "-ign_eof"];
        args.extend(self.alpn.iter().flat_map(|alpn| ["-alpn", alpn]));
        let files = self
            .certificate
            .map(|leaf| [&leaf.certificate, &leaf.chain, &leaf.key].map(|path| path.to_str().unwrap()));
        if let Some([certificate, chain, key]) = files {
            args.extend(["-cert", certificate, "-cert_chain", chain, "-key", key]);
        }
        programs::run(host, "openssl", &args, input)
    }
}

impl ProgramOutput {
    /// The server certificate that `openssl s_client` received, PEM.
    pub(crate) fn certificate(&self) -> &str {
        let start = self
            .out
            .find(BEGIN)
            .unwrap_or_else(|| panic!("no certificate: {self:?}"));
        let end = self.out[start..]
            .find(END)
            .unwrap_or_else(|| panic!("incomplete certificate: {self:?}"));
        self.out[start..start + end + END.len()].trim()
    }
}

/// Starts a TLS server that answers every request. It presents `named` to clients that request `name`, and `other` to all others.
pub(crate) fn server(
    testbed: &Testbed,
    host: &Arc<Namespace>,
    port: u16,
    name: &str,
    [named, other]: [&Leaf; 2],
) -> Process {
    let mut command = hosts::command(host, &[], &find("openssl").unwrap());
    command.args(["s_server", "-www", "-accept", &port.to_string(), "-servername", name]);
    command.arg("-cert").arg(&other.certificate).arg("-key").arg(&other.key);
    command
        .arg("-cert2")
        .arg(&named.certificate)
        .arg("-key2")
        .arg(&named.key);
    let mut process = testbed.start(&format!("s_server-{port}"), command);
    process.wait_for_ports(&[port]).unwrap();
    process
}

const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
const END: &str = "-----END CERTIFICATE-----";
