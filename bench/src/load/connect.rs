use tokio::net::TcpStream;

use super::outcome::Failure;
use super::target::Target;

/// Connects, with TCP_NODELAY.
pub(super) async fn connect(target: &Target) -> Result<TcpStream, Failure> {
    let stream = TcpStream::connect(target.addr)
        .await
        .map_err(|error| Failure::from_connect_error(&error))?;
    stream
        .set_nodelay(true)
        .map_err(|error| Failure::from_connect_error(&error))?;
    Ok(stream)
}
