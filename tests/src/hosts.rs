//! Actions on a host, which is a network namespace.

use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use tulle_core::names::port;
use tulle_core::netns::Namespace;

/// A command in a namespace, with these options of `setpriv`. It is killed when its parent dies for any reason.
pub fn command(host: &Namespace, setpriv_options: &[&str], program: &Path) -> Command {
    let mut command = host.command("setpriv");
    command.arg("--pdeathsig=KILL").args(setpriv_options).arg(program);
    command
}

/// Sends GET to the admin server of a host's sidecar; returns everything after `HTTP/1.1 200`.
///
/// # Errors
/// Fails if the server does not answer, or answers with another status.
pub fn admin_get(host: &Namespace, path: &str) -> io::Result<String> {
    http_get(host, port::ADMIN, path)
}

/// Sends GET to an HTTP server on the loopback address of a host; returns everything after `HTTP/1.1 200`.
///
/// # Errors
/// Fails if the server does not answer, or answers with another status.
pub fn http_get(host: &Namespace, port: u16, path: &str) -> io::Result<String> {
    let send_request = || {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
        stream.set_read_timeout(Some(READ_TIMEOUT))?;
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nhost: proxy\r\nconnection: close\r\n\r\n"
        )?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    let answer: io::Result<String> = host.run(send_request).map_err(io::Error::other)?;
    let answer = answer?;
    match answer.strip_prefix("HTTP/1.1 200") {
        Some(answer) => Ok(answer.to_owned()),
        None => {
            let status = answer.lines().next().unwrap_or_default();
            Err(io::Error::other(format!("unexpected status: {status}")))
        }
    }
}

const READ_TIMEOUT: Duration = Duration::from_secs(5);
