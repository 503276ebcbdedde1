//! Protocol upgrades, WebSocket, CONNECT tunnels, and interim responses.

pub(crate) mod http1_over_http2;
pub(crate) mod interim;
pub(crate) mod reply_channels;
pub(crate) mod tunnel;
pub(crate) mod websocket;
