//! Settings of the destination service.

use tulle_proto::destination::Http2ClientParams;

#[derive(Clone, Debug, Default)]
pub struct Config {
    /// HTTP/2 settings for clients of meshed endpoints. Default none: clients keep their own.
    pub http2: Option<Http2ClientParams>,
    /// Whether endpoints in the client's zone have a higher weight. Default no.
    pub zone_weights: ZoneWeights,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ZoneWeights {
    #[default]
    Equal,
    /// Endpoints in the client's zone have ten times the weight.
    PreferLocal,
}
