//! A chart repository, made with `helm package` and served over HTTP.

use std::net::SocketAddr;
use std::path::Path;

use anyhow::Context as _;
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use super::helm::{Helm, chart_path};

/// Serves `tulle-crds` and `tulle-control-plane` until dropped.
pub struct Repository {
    addr: SocketAddr,
    server: JoinHandle<()>,
    _files: TempDir,
}

impl Repository {
    /// Packages the two charts and serves them.
    ///
    /// # Errors
    /// Fails if Helm fails.
    pub async fn start() -> anyhow::Result<Self> {
        let files = tempfile::tempdir()?;
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let addr = listener.local_addr()?;
        let helm = Helm::new()?;
        let dir = files.path().to_str().context("a path in UTF-8")?;
        for chart in ["tulle-crds", "tulle-control-plane"] {
            helm.run(&["package", "--destination", dir, &chart_path(chart)])?;
        }
        helm.run(&["repo", "index", dir, "--url", &format!("http://{addr}")])?;
        let root = files.path().to_owned();
        let server = tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let root = root.clone();
                let answer = service_fn(move |req| {
                    let rsp = file(&root, &req);
                    async { Ok::<_, std::convert::Infallible>(rsp) }
                });
                // An error means that the client closed the connection early, which is ignored.
                tokio::spawn(hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(socket), answer));
            }
        });
        Ok(Self {
            addr,
            server,
            _files: files,
        })
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }
}

impl Drop for Repository {
    fn drop(&mut self) {
        self.server.abort();
    }
}

fn file(root: &Path, req: &Request<Incoming>) -> Response<Full<Bytes>> {
    // Only names without directories exist.
    let name = Path::new(req.uri().path()).file_name();
    let (status, body) = match name.map(|name| std::fs::read(root.join(name))) {
        Some(Ok(body)) => (StatusCode::OK, body),
        _ => (StatusCode::NOT_FOUND, Vec::new()),
    };
    let mut rsp = Response::new(Full::from(body));
    *rsp.status_mut() = status;
    rsp
}
