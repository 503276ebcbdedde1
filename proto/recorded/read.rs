//! Parses the recordings in this directory, for the tests that include this file.

use std::fs;

/// A request to Linkerd's control plane, and the response.
pub(crate) struct Recorded {
    /// `policy`, `port`, `profile` or `get`.
    pub(crate) kind: String,
    pub(crate) target: String,
    /// Encoded messages.
    pub(crate) messages: Vec<Vec<u8>>,
    /// The gRPC status that ended the stream; or the word `Silence`, if the stream stayed open without a message. It is `None` if
    /// there are messages.
    pub(crate) status: Option<String>,
}

impl Recorded {
    /// The request, as the file writes it.
    pub(crate) fn request(&self) -> String {
        format!("{} {}", self.kind, self.target)
    }
}

/// The responses in one of the files.
pub(crate) fn recorded(name: &str) -> Vec<Recorded> {
    let text = fs::read_to_string(path(&format!("{name}.txt"))).unwrap();
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let all: Vec<_> = lines.map(parse_line).collect();
    assert!(!all.is_empty(), "{name} has no recorded responses");
    all
}

/// The path of a file in this directory.
pub(crate) fn path(file: &str) -> String {
    format!("{}/../proto/recorded/{file}", env!("CARGO_MANIFEST_DIR"))
}

fn parse_line(line: &str) -> Recorded {
    let mut words = line.split(' ').map(str::to_owned);
    let (kind, target) = (words.next().unwrap(), words.next().unwrap());
    let (status, messages) = words.partition::<Vec<_>, _>(|word| word.starts_with(|first: char| first.is_uppercase()));
    Recorded {
        kind,
        target,
        messages: messages.iter().map(|word| decode_hex(word)).collect(),
        status: status.into_iter().next(),
    }
}

/// Decodes hexadecimal digits; the word `empty` means no bytes.
fn decode_hex(digits: &str) -> Vec<u8> {
    let pairs = digits.strip_prefix("empty").unwrap_or(digits).as_bytes().chunks(2);
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    pairs.map(byte).collect()
}
