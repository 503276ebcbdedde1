//! Byte echo, with and without a greeting.

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use tulle_core::drain::Watch;

use super::App;

/// Sends `hello from <name>\n`, then echoes.
pub(super) async fn greet_and_echo(mut stream: TcpStream, app: &App, watch: Watch) {
    super::pause(app.delay).await;
    if stream
        .write_all(format!("hello from {}\n", app.name).as_bytes())
        .await
        .is_ok()
    {
        echo(stream, app, watch).await;
    }
}

/// Sends every byte back until the peer ends, an error, or the drain.
pub(super) async fn echo(mut stream: TcpStream, app: &App, watch: Watch) {
    let mut buf = vec![0; BUFFER];
    loop {
        let read = tokio::select! {
            // What has arrived before the drain is still answered.
            biased;
            read = stream.read(&mut buf) => read,
            () = watch.signaled() => break,
        };
        let n = match read {
            Ok(0) => break,
            Ok(n) => n,
            Err(_) => return,
        };
        super::pause(app.delay).await;
        if stream.write_all(&buf[..n]).await.is_err() {
            return;
        }
    }
    // The peer may be gone already; nobody else is interested.
    let _ = stream.shutdown().await;
}

/// Large enough that bulk measurements find the proxies, not this loop.
const BUFFER: usize = 64 * 1024;
