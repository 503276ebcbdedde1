//! Reads the recordings beside this file, for the tests that include it.

use std::fs;

/// A question to Linkerd's control plane, and what came of it.
pub(crate) struct Recorded {
    /// `policy`, `port`, `profile` or `get`.
    pub(crate) kind: String,
    pub(crate) target: String,
    /// In the encoding of the wire.
    pub(crate) messages: Vec<Vec<u8>>,
    /// The gRPC status that ended the stream, if it did; `Silence` where nothing came at all.
    pub(crate) status: Option<String>,
}

impl Recorded {
    /// As the file names it.
    pub(crate) fn question(&self) -> String {
        format!("{} {}", self.kind, self.target)
    }
}

/// The answers in one of the files.
pub(crate) fn recorded(name: &str) -> Vec<Recorded> {
    let text = fs::read_to_string(path(&format!("{name}.txt"))).unwrap();
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let all: Vec<_> = lines.map(line).collect();
    assert!(!all.is_empty(), "{name} has no answers");
    all
}

/// The path of a file beside this one.
pub(crate) fn path(file: &str) -> String {
    format!("{}/../proto/recorded/{file}", env!("CARGO_MANIFEST_DIR"))
}

fn line(line: &str) -> Recorded {
    let mut words = line.split(' ').map(str::to_owned);
    let (kind, target) = (words.next().unwrap(), words.next().unwrap());
    let (status, messages) = words.partition::<Vec<_>, _>(|word| word.starts_with(|first: char| first.is_uppercase()));
    Recorded {
        kind,
        target,
        messages: messages.iter().map(|word| bytes(word)).collect(),
        status: status.into_iter().next(),
    }
}

/// Bytes from hexadecimal digits; no bytes are written as `empty`.
fn bytes(digits: &str) -> Vec<u8> {
    let pairs = digits.strip_prefix("empty").unwrap_or(digits).as_bytes().chunks(2);
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    pairs.map(byte).collect()
}
