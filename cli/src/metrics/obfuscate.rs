//! Obfuscates label values in metrics, and names of pods. Equal values stay equal; labels with fixed values are kept.

use std::hash::{BuildHasher as _, RandomState};

/// A hash function with a random key. Each run of a command has another key.
pub(super) struct Obfuscation(RandomState);

impl Obfuscation {
    pub(super) fn new() -> Self {
        Self(RandomState::new())
    }

    /// Replaces the value of each label that can contain a name of the user.
    pub(super) fn obfuscate(&self, page: &str) -> String {
        let mut out = String::with_capacity(page.len());
        for line in page.lines() {
            match (line.starts_with('#'), line.split_once('{')) {
                (false, Some((name, rest))) => {
                    out.push_str(name);
                    out.push('{');
                    self.obfuscate_labels(rest, &mut out);
                }
                _ => out.push_str(line),
            }
            out.push('\n');
        }
        out
    }

    /// Hashes a label value or the name of a pod.
    pub(super) fn hash_value(&self, value: &str) -> String {
        format!("{:016x}", self.0.hash_one(value))
    }

    /// Obfuscates `name="value",…}`, and copies the rest of the line.
    fn obfuscate_labels(&self, mut rest: &str, out: &mut String) {
        while let Some((name, after)) = rest.split_once("=\"") {
            if name.contains('}') {
                break;
            }
            let end = end_of_value(after);
            let (value, next) = after.split_at(end);
            out.push_str(name);
            out.push_str("=\"");
            if value.is_empty() || UNOBFUSCATED_LABELS.contains(&name.trim_start_matches([',', ' '])) {
                out.push_str(value);
            } else {
                out.push_str(&self.hash_value(value));
            }
            out.push_str(next.get(..1).unwrap_or_default());
            rest = next.get(1..).unwrap_or_default();
        }
        out.push_str(rest);
    }
}

/// The position of the closing quote. Quotes and backslashes in the value are escaped by a backslash.
fn end_of_value(text: &str) -> usize {
    let mut escaped = false;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'"' if !escaped => return at,
            b'\\' => escaped = !escaped,
            _ => escaped = false,
        }
    }
    text.len()
}

/// Labels whose values are fixed terms, numbers, or describe the build.
const UNOBFUSCATED_LABELS: &[&str] = &[
    "cause",
    "classification",
    "direction",
    "error",
    "family",
    "grpc_status",
    "http_status",
    "le",
    "no_tls_reason",
    "outcome",
    "overflow",
    "peer",
    "protocol",
    "quantile",
    "result",
    "server",
    "session_protocol",
    "srv_kind",
    "status_code",
    "tls",
    "version",
    "git_sha",
    "git_branch",
    "vendor",
    "profile",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_replaced_consistently() {
        let page = "\
# HELP request_total {pod=\"x\"}
request_total{direction=\"outbound\",dst_pod=\"web-1\",authority=\"a\\\"},b\",status_code=\"200\"} 7
response_latency_ms_bucket{le=\"1\",dst_pod=\"web-1\",client_id=\"\"} 3 1700000000
process_open_fds 9
";
        let obfuscation = Obfuscation::new();
        let out = obfuscation.obfuscate(page);
        let lines: Vec<_> = out.lines().collect();
        assert_eq!(lines[0], "# HELP request_total {pod=\"x\"}");
        let hash = obfuscation.hash_value("web-1");
        assert!(lines[1].starts_with(&format!(
            "request_total{{direction=\"outbound\",dst_pod=\"{hash}\",authority=\""
        )));
        assert!(
            lines[1].ends_with(",status_code=\"200\"} 7") && !lines[1].contains("a\\"),
            "{out}"
        );
        assert_eq!(
            lines[2],
            format!("response_latency_ms_bucket{{le=\"1\",dst_pod=\"{hash}\",client_id=\"\"}} 3 1700000000")
        );
        assert_eq!(lines[3], "process_open_fds 9");
    }

    #[test]
    fn a_truncated_page_is_accepted() {
        for page in ["a{", "a{b=\"", "a{b=\"c\\", "a{b}", "a{b=\"ü"] {
            let _ = Obfuscation::new().obfuscate(page);
        }
    }
}
