//! TCP echo, with and without a greeting.

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use tulle_core::drain::Watch;

use super::app::App;

/// Sends `hello from <name>\n`, then echoes.
pub(super) async fn greet_and_echo(mut stream: TcpStream, app: &App, watch: Watch) {
    super::app::delay_response(app.delay).await;
    if stream
        .write_all(format!("hello from {}\n", app.name).as_bytes())
        .await
        .is_ok()
    {
        echo(stream, app, watch).await;
    }
}

/// Echoes bytes until the peer closes, an error occurs, or the process drains.
pub(super) async fn echo(mut stream: TcpStream, app: &App, watch: Watch) {
    let mut buf = vec![0; BUFFER_BYTES];
    loop {
        let read = tokio::select! {
            // Bytes that arrived before the drain are still echoed.
            biased;
            read = stream.read(&mut buf) => read,
            () = watch.signaled() => break,
        };
        let n = match read {
            Ok(0) => break,
            Ok(n) => n,
            Err(_) => return,
        };
        super::app::delay_response(app.delay).await;
        if stream.write_all(&buf[..n]).await.is_err() {
            return;
        }
    }
    // The peer may have closed the connection already.
    let _ = stream.shutdown().await;
}

/// Large enough that this loop does not limit bulk measurements.
const BUFFER_BYTES: usize = 64 * 1024;
