//! `grpc` probes: gRPC's health check, in plaintext.

use std::net::SocketAddr;
use std::time::Duration;

use http::header::USER_AGENT;
use http::{HeaderValue, Request, Uri};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tonic::body::Body;
use tower::service_fn;
use tulle_proto::health::HealthCheckRequest;
use tulle_proto::health::health_check_response::ServingStatus;
use tulle_proto::health::health_client::HealthClient;

use super::connection::{self, ProbeError};

/// Calls the health check of `service`.
///
/// # Errors
/// The call fails, or the status is not `SERVING`.
pub(super) async fn check(
    addr: SocketAddr,
    service: &str,
    limit: Duration,
    user_agent: &HeaderValue,
) -> Result<(), ProbeError> {
    let http_error = |source| ProbeError::Http { addr, source };
    let stream = connection::dial(addr).await?;
    let (sender, connection) = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .handshake(TokioIo::new(stream))
        .await
        .map_err(http_error)?;
    let send = service_fn(move |mut req: Request<Body>| {
        req.headers_mut().insert(USER_AGENT, user_agent.clone());
        let mut sender = sender.clone();
        async move { sender.send_request(req).await }
    });
    let origin = Uri::builder()
        .scheme("http")
        .authority(addr.to_string())
        .path_and_query("/");
    let origin = origin.build().expect("an address is an authority");
    let mut client = HealthClient::with_origin(send, origin);
    let mut request = tonic::Request::new(HealthCheckRequest {
        service: service.to_owned(),
    });
    request.set_timeout(limit);
    let result = connection::drive_connection(connection, client.check(request)).await;
    let response = result.map_err(|status| ProbeError::HealthCheck {
        service: service.to_owned(),
        code: status.code(),
        message: status.message().to_owned(),
    })?;
    match response.into_inner().status() {
        ServingStatus::Serving => Ok(()),
        status => Err(ProbeError::NotServing {
            service: service.to_owned(),
            status: status.as_str_name().to_owned(),
        }),
    }
}
