//! Settings of the policy services.

#[derive(Clone, Copy, Debug, Default)]
pub struct Config {
    /// Whether proxies honor the headers `l5d-timeout` and `l5d-retry-*` of requests. Default no.
    pub l5d_headers: L5dHeaders,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum L5dHeaders {
    #[default]
    Ignore,
    Honor,
}
