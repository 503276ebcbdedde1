//! What tests do on a host, which is a network namespace.

use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use tulle_core::names::port;
use tulle_core::netns::Namespace;

/// A command that starts inside a namespace, with these settings of `setpriv`, and ends with who started it, whatever way
/// that ends.
pub fn command(host: &Namespace, settings: &[&str], program: &Path) -> Command {
    let mut command = host.command("setpriv");
    command.arg("--pdeathsig=KILL").args(settings).arg(program);
    command
}

/// What the admin server of a host's sidecar says with success.
///
/// # Errors
/// When nobody answers, or with another status.
pub fn admin(host: &Namespace, path: &str) -> io::Result<String> {
    page(host, port::ADMIN, path)
}

/// What an HTTP server on the loopback address of a host says with success, the headers of its answer included.
///
/// # Errors
/// When nobody answers, or with another status.
pub fn page(host: &Namespace, port: u16, path: &str) -> io::Result<String> {
    let ask = || {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
        stream.set_read_timeout(Some(ADMIN_TIMEOUT))?;
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nhost: proxy\r\nconnection: close\r\n\r\n"
        )?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    let answer: io::Result<String> = host.run(ask).map_err(io::Error::other)?;
    match answer?.strip_prefix("HTTP/1.1 200") {
        Some(answer) => Ok(answer.to_owned()),
        None => Err(io::Error::other("not ready")),
    }
}

const ADMIN_TIMEOUT: Duration = Duration::from_secs(5);
