//! Syntax of DNS names, as Kubernetes requires it for names of objects.

/// Returns whether the text is a DNS label, apart from the maximum length.
pub fn is_dns_label_of_any_length(label: &str) -> bool {
    let alphanumeric = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = label.as_bytes();
    bytes.first().is_some_and(alphanumeric)
        && bytes.last().is_some_and(alphanumeric)
        && bytes.iter().all(|byte| alphanumeric(byte) || *byte == b'-')
}

/// Returns whether a text is one DNS label. Kubernetes requires this for names of namespaces, tulle also for names of service
/// accounts to which it issues certificates.
pub fn is_dns_label(text: &str) -> bool {
    text.len() <= 63 && is_dns_label_of_any_length(text)
}

/// Returns whether a name is a DNS-1123 subdomain, which Kubernetes requires for object names.
pub fn is_dns_subdomain(name: &str) -> bool {
    name.len() <= 253 && name.split('.').all(is_dns_label_of_any_length)
}
