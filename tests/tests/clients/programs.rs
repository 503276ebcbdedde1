//! Other people's programs, and what they say.

use std::fmt;
use std::io::{Read as _, Write as _};
use std::process::{Command, ExitStatus, Stdio};
use std::thread;

use tulle_core::netns::Namespace;
use tulle_tests::programs::find;

/// What a program said before it ended.
pub(crate) struct Said {
    pub(crate) status: ExitStatus,
    pub(crate) out: String,
    errors: String,
}

impl fmt::Debug for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\n{}\n{}", self.status, self.out, self.errors)
    }
}

/// Runs a program to its end inside a namespace, with `input`; cut off after a time.
pub(crate) fn run(host: &Namespace, program: &str, args: &[&str], input: &[u8]) -> Said {
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
    // A program that does not read its input has ended, and says why itself.
    let _ = child.stdin.take().unwrap().write_all(input);
    let mut stderr = child.stderr.take().unwrap();
    let reading = thread::spawn(move || {
        let mut bytes = Vec::new();
        stderr.read_to_end(&mut bytes).unwrap();
        bytes
    });
    let output = child.wait_with_output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Said {
        status: output.status,
        out: text(&output.stdout),
        errors: text(&reading.join().unwrap()),
    }
}

const LIMIT_SECONDS: &str = "18";
