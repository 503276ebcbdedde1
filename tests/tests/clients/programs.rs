//! Runs third-party programs and captures their output.

use std::fmt;
use std::io::{Read as _, Write as _};
use std::process::{Command, ExitStatus, Stdio};
use std::thread;

use tulle_core::netns::Namespace;
use tulle_tests::programs::find;

pub(crate) struct ProgramOutput {
    pub(crate) status: ExitStatus,
    pub(crate) out: String,
    errors: String,
}

impl fmt::Debug for ProgramOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\n{}\n{}", self.status, self.out, self.errors)
    }
}

/// Runs a program in a namespace with `input` until it exits, with a time limit.
pub(crate) fn run(host: &Namespace, program: &str, args: &[&str], input: &[u8]) -> ProgramOutput {
    let program = find(program).unwrap();
    let mut command: Command = host.command("timeout");
    let mut child = command
        .arg(LIMIT_SECONDS)
        .arg(program)
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A write error means that the program has exited; its output explains why.
    let _ = child.stdin.take().unwrap().write_all(input);
    let mut stderr = child.stderr.take().unwrap();
    let reading = thread::spawn(move || {
        let mut bytes = Vec::new();
        stderr.read_to_end(&mut bytes).unwrap();
        bytes
    });
    let output = child.wait_with_output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    ProgramOutput {
        status: output.status,
        out: text(&output.stdout),
        errors: text(&reading.join().unwrap()),
    }
}

const LIMIT_SECONDS: &str = "18";
