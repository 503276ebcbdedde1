//! The path of one request (O5–O12): the route, attempts, an endpoint and a connection to it, retries.

mod attempt;
mod connect;
pub(super) mod context;
mod dispatch;
mod observe;
mod profile;
mod retry;
mod route;
