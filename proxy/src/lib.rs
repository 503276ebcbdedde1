pub mod tls;
mod http;
mod metrics;
mod net;
