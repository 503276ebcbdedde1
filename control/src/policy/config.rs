//! Settings of the policy services.

#[derive(Clone, Copy, Debug, Default)]
pub struct Config {
    /// Whether proxies honor the headers `l5d-timeout` and `l5d-retry-*` of requests. Default no.
    pub request_headers: RequestHeaders,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RequestHeaders {
    #[default]
    Ignore,
    Honour,
}
