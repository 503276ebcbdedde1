//! `openssl s_client` and `openssl s_server`.

use std::net::SocketAddr;
use std::sync::Arc;

use tulle_bench::run::process::Process;
use tulle_core::netns::Namespace;
use tulle_tests::credentials::Leaf;
use tulle_tests::hosts;
use tulle_tests::programs::find;

use crate::programs::{self, Said};
use crate::scene::Scene;

/// One connection of `openssl s_client`.
#[derive(Clone, Copy)]
pub(crate) struct Client<'a> {
    pub(crate) to: SocketAddr,
    /// Whom it asks for.
    pub(crate) name: &'a str,
    pub(crate) alpn: Option<&'a str>,
    /// What the client shows.
    pub(crate) shown: Option<&'a Leaf>,
}

impl Client<'_> {
    /// Shakes hands, says `words`, and listens until the server ends the connection.
    pub(crate) fn say(&self, host: &Namespace, words: &[u8]) -> Said {
        let to = self.to.to_string();
        let mut args = vec!["s_client", "-connect", &to, "-servername", self.name, "-ign_eof"];
        args.extend(self.alpn.iter().flat_map(|alpn| ["-alpn", alpn]));
        let files = self
            .shown
            .map(|leaf| [&leaf.certificate, &leaf.chain, &leaf.key].map(|path| path.to_str().unwrap()));
        if let Some([certificate, chain, key]) = files {
            args.extend(["-cert", certificate, "-cert_chain", chain, "-key", key]);
        }
        programs::run(host, "openssl", &args, words)
    }
}

impl Said {
    /// The certificate that the server has shown to `openssl s_client`, PEM.
    pub(crate) fn certificate(&self) -> &str {
        let start = self
            .out
            .find(BEGIN)
            .unwrap_or_else(|| panic!("no certificate: {self:?}"));
        let end = self.out[start..]
            .find(END)
            .unwrap_or_else(|| panic!("half of it: {self:?}"));
        self.out[start..start + end + END.len()].trim()
    }
}

/// Starts a TLS server that answers every request, with `named` for clients that ask for `name` and `other` for all else.
pub(crate) fn server(
    scene: &Scene,
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
    let mut process = scene.start(&format!("s_server-{port}"), command);
    process.listening(&[port]).unwrap();
    process
}

const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
const END: &str = "-----END CERTIFICATE-----";
