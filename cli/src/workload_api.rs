//! A SPIFFE Workload API for a machine without SPIRE: serves key, certificate and trust anchors to the local sidecar.
//!
//! SPIRE attests the calling process. Here the operator configures user ids: processes of these users get the configured
//! identities, and all other processes get an error.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, bail, ensure};
use clap::Args as ClapArgs;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until, timeout};
use tokio_stream::wrappers::WatchStream;
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Request, Response, Status};
use tower::ServiceExt as _;
use tulle_control::tls::anchors::TrustAnchors;
use tulle_control::trust::{self, CertificateAuthority};
use tulle_core::descriptors;
use tulle_core::identity::Identity;
use tulle_core::names::WORKLOAD_API_METADATA;
use tulle_core::wall_clock::Deadline;
use tulle_proto::workload::spiffe_workload_api_server::{SpiffeWorkloadApi, SpiffeWorkloadApiServer};
use tulle_proto::workload::{X509BundlesRequest, X509BundlesResponse, X509svid, X509svidRequest, X509svidResponse};

#[derive(ClapArgs, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The identity of sidecars, such as spiffe://root.linkerd.cluster.local/vm-1; may be repeated
    #[arg(long = "identity", value_name = "URI", required = true, value_parser = parse_spiffe_identity)]
    identities: Vec<String>,
    /// The socket of the API; sidecars use it with LINKERD2_PROXY_IDENTITY_SPIRE_SOCKET=unix://PATH
    #[arg(long, value_name = "PATH", default_value = "/run/tulle/workload-api.sock")]
    socket: PathBuf,
    /// The directory with crt.pem and key.pem of the issuer; read again when they change
    #[arg(long, value_name = "DIR", default_value = "issuer")]
    issuer: PathBuf,
    /// The trust anchors of the mesh, a PEM bundle; read again when it changes
    #[arg(long, value_name = "FILE", default_value = "ca.crt")]
    trust_anchors: PathBuf,
    /// The id of a user whose processes are served; may be repeated [default: the current user]
    #[arg(long = "uid", value_name = "UID")]
    uids: Vec<u32>,
    /// The lifetime of certificates; they are renewed after half of it
    #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = tulle_core::duration::parse_lifetime)]
    lifetime: Duration,
}

/// Serves until the process is stopped.
pub(crate) fn main(args: &Args) -> anyhow::Result<()> {
    crate::runtime()?.block_on(serve(args))
}

/// The responses that every authorized caller gets.
#[derive(Clone)]
struct SvidResponses {
    svids: X509svidResponse,
    bundles: X509BundlesResponse,
}

/// The files from which the responses are created.
#[derive(PartialEq)]
struct IssuerFiles {
    issuer: CertificateAuthorityPem,
    anchors: Vec<u8>,
}

#[derive(PartialEq)]
struct CertificateAuthorityPem {
    certificate: String,
    key: String,
}

async fn serve(args: &Args) -> anyhow::Result<()> {
    let mut files = IssuerFiles::read(args)?;
    let (sender, responses) = watch::channel(Arc::new(files.issue(args)?));
    let socket = Socket::bind(&args.socket)?;
    println!(
        "serving {} at unix://{}",
        args.identities.join(", "),
        args.socket.display()
    );
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let connection_limits = ConnectionLimits::new(match args.uids.is_empty() {
        true => vec![nix::unistd::Uid::current().as_raw()],
        false => args.uids.clone(),
    });
    descriptors::raise_limit();
    let mut renewal_due = Deadline::after(args.lifetime / 2, SystemTime::now);
    let mut file_poll = interval(FILE_POLL_INTERVAL);
    file_poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut connections = JoinSet::new();
    let mut last_error = None;
    let mut accept_at = Instant::now();
    let mut client_log = RateLimitedLog::default();
    loop {
        // All branches only wait. No accepted connection is lost, because `accept` is cancel-safe.
        tokio::select! {
            _ = terminate.recv() => return Ok(()),
            _ = interrupt.recv() => return Ok(()),
            Some(_) = connections.join_next() => {}
            accepted = accept_after(accept_at, &socket.listener) => match accepted {
                Ok((stream, uid)) => match connection_limits.admit(uid) {
                    Some((caller, permit)) => {
                        let api = Api { caller, responses: responses.clone() };
                        connections.spawn(api.serve_connection(stream, permit));
                    }
                    None if connection_limits.is_authorized(uid) => client_log.log(format_args!(
                        "user {uid} already has {MAX_CONNECTIONS_PER_USER} connections; a new one is closed"
                    )),
                    // Unauthorized clients do not fill the log.
                    None => {}
                },
                Err(error) => {
                    client_log.log(format_args!("accepting a connection failed: {error}"));
                    // The usual cause is a lack of file descriptors. An immediate retry would only use CPU time.
                    accept_at = Instant::now() + ACCEPT_ERROR_BACKOFF;
                }
            },
            _ = file_poll.tick() => match renew_if_due(args, &files, &renewal_due) {
                Ok(None) => {}
                Ok(Some((new, responses))) => {
                    files = new;
                    renewal_due = Deadline::after(args.lifetime / 2, SystemTime::now);
                    last_error = None;
                    sender.send_replace(Arc::new(responses));
                }
                // The previous responses stay valid.
                Err(error) => {
                    let text = format!("{error:#}");
                    if last_error.as_ref() != Some(&text) {
                        eprintln!("renewing the certificates failed: {text}");
                    }
                    last_error = Some(text);
                }
            },
        }
    }
}

/// Waits until `at`, then accepts the next connection and reads its user id. Cancel-safe: no connection is lost.
async fn accept_after(at: Instant, listener: &UnixListener) -> io::Result<(UnixStream, u32)> {
    sleep_until(at).await;
    let (stream, _) = listener.accept().await?;
    let uid = stream.peer_cred()?.uid();
    Ok((stream, uid))
}

/// Creates new responses if the files have changed, or if half of the lifetime of the certificates has passed.
fn renew_if_due(
    args: &Args,
    files: &IssuerFiles,
    renewal_due: &Deadline,
) -> anyhow::Result<Option<(IssuerFiles, SvidResponses)>> {
    let current = IssuerFiles::read(args)?;
    if current == *files && !renewal_due.has_passed() {
        return Ok(None);
    }
    let responses = current.issue(args)?;
    Ok(Some((current, responses)))
}

impl IssuerFiles {
    fn read(args: &Args) -> anyhow::Result<Self> {
        let authority = CertificateAuthority::read(&args.issuer.join("crt.pem"), &args.issuer.join("key.pem"))
            .context("reading --issuer")?;
        let anchors = &args.trust_anchors;
        Ok(Self {
            issuer: CertificateAuthorityPem {
                certificate: authority.certificate,
                key: authority.key,
            },
            anchors: fs::read(anchors).with_context(|| format!("reading --trust-anchors {anchors:?}"))?,
        })
    }

    /// Signs certificates. Fails if they do not chain to the trust anchors, because every sidecar would reject them.
    fn issue(&self, args: &Args) -> anyhow::Result<SvidResponses> {
        let anchors = TrustAnchors::parse(&self.anchors, &args.trust_anchors).context("--trust-anchors")?;
        let bundle: Vec<u8> = anchors.certs().iter().flat_map(|der| der.to_vec()).collect();
        let issuer = CertificateAuthority {
            certificate: self.issuer.certificate.clone(),
            key: self.issuer.key.clone(),
        };
        let (mut svids, mut bundles) = (X509svidResponse::default(), X509BundlesResponse::default());
        for identity in &args.identities {
            let svid = trust::create_svid(identity, args.lifetime, &issuer)?;
            anchors
                .verify_chain(&svid.chain)
                .with_context(|| format!("the issuer in {:?} is not verified by the trust anchors", args.issuer))?;
            bundles.bundles.insert(trust_domain(identity), bundle.clone());
            svids.svids.push(X509svid {
                spiffe_id: identity.clone(),
                x509_svid: svid.chain.concat(),
                x509_svid_key: svid.key,
                bundle: bundle.clone(),
                hint: String::new(),
            });
        }
        Ok(SvidResponses { svids, bundles })
    }
}

/// The socket in the file system. Dropping this value removes it.
struct Socket {
    listener: UnixListener,
    path: PathBuf,
}

impl Socket {
    fn bind(path: &Path) -> anyhow::Result<Self> {
        if let Some(dir) = path.parent() {
            fs::create_dir_all(dir).with_context(|| format!("creating the directory {dir:?}"))?;
        }
        if let Ok(found) = fs::symlink_metadata(path) {
            ensure!(
                found.file_type().is_socket(),
                "{path:?} exists and is not a socket; choose another --socket"
            );
            if StdUnixStream::connect(path).is_ok() {
                bail!("{path:?} is in use by another process; stop it or choose another --socket");
            }
            fs::remove_file(path).with_context(|| format!("removing the unused socket {path:?}"))?;
        }
        let listener = UnixListener::bind(path).with_context(|| format!("listening on --socket {path:?}"))?;
        // Every user can connect. Authorization is by user id, for each connection.
        fs::set_permissions(path, Permissions::from_mode(0o666))
            .with_context(|| format!("making {path:?} accessible to all users"))?;
        Ok(Self {
            listener,
            path: path.to_owned(),
        })
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        // If removal fails, the next start detects that the socket is unused.
        let _ = fs::remove_file(&self.path);
    }
}

/// Authorized users and the connection limit of each. Every local user can connect to the socket; the limits prevent one user
/// from exhausting the file descriptors of this process.
struct ConnectionLimits {
    authorized: Vec<(u32, Arc<Semaphore>)>,
    /// Permits for the connections of all other users together. Their requests get an error.
    unauthorized: Arc<Semaphore>,
}

impl ConnectionLimits {
    fn new(uids: Vec<u32>) -> Self {
        let permits = |uid| (uid, Arc::new(Semaphore::new(MAX_CONNECTIONS_PER_USER)));
        Self {
            authorized: uids.into_iter().map(permits).collect(),
            unauthorized: Arc::new(Semaphore::new(MAX_UNAUTHORIZED_CONNECTIONS)),
        }
    }

    fn is_authorized(&self, uid: u32) -> bool {
        self.authorized.iter().any(|(authorized_uid, _)| *authorized_uid == uid)
    }

    /// Reserves a connection of this user, or returns `None` at the limit.
    fn admit(&self, uid: u32) -> Option<(Caller, OwnedSemaphorePermit)> {
        let own = self
            .authorized
            .iter()
            .find(|(authorized_uid, _)| *authorized_uid == uid);
        let is_authorized = own.is_some();
        let permits = own.map_or(&self.unauthorized, |(_, permits)| permits);
        let permit = permits.clone().try_acquire_owned().ok()?;
        Some((Caller { uid, is_authorized }, permit))
    }
}

/// Logs client errors on standard error, at most one line per minute because clients can trigger them.
#[derive(Default)]
struct RateLimitedLog {
    last_at: Option<Instant>,
}

impl RateLimitedLog {
    fn log(&mut self, text: std::fmt::Arguments<'_>) {
        if self.last_at.is_none_or(|at| at.elapsed() >= MIN_LOG_INTERVAL) {
            eprintln!("{text}");
            self.last_at = Some(Instant::now());
        }
    }
}

/// The API for one connection.
#[derive(Clone)]
struct Api {
    caller: Caller,
    responses: watch::Receiver<Arc<SvidResponses>>,
}

#[derive(Clone, Copy)]
struct Caller {
    uid: u32,
    is_authorized: bool,
}

impl Api {
    /// Serves a connection until it ends, then releases its permit. An unauthorized caller is disconnected after
    /// [`UNAUTHORIZED_CONNECTION_TIMEOUT`], an authorized one if it sends nothing within [`FIRST_BYTE_TIMEOUT`].
    async fn serve_connection(self, stream: UnixStream, _permit: OwnedSemaphorePermit) {
        match self.caller.is_authorized {
            true => {
                // If the stream has ended or failed, the server detects it.
                if timeout(FIRST_BYTE_TIMEOUT, stream.readable()).await.is_ok() {
                    self.serve_requests(stream).await;
                }
            }
            // The timeout is long enough for one request and its error response.
            false => drop(timeout(UNAUTHORIZED_CONNECTION_TIMEOUT, self.serve_requests(stream)).await),
        }
    }

    async fn serve_requests(self, stream: UnixStream) {
        let api = SpiffeWorkloadApiServer::new(self);
        let service = service_fn(move |req| api.clone().oneshot(req));
        // An error only means that the sidecar disconnected.
        let _ = http2::Builder::new(TokioExecutor::new())
            .serve_connection(TokioIo::new(stream), service)
            .await;
    }

    fn check_request<T>(&self, req: &Request<T>) -> Result<(), Status> {
        if req
            .metadata()
            .get(WORKLOAD_API_METADATA)
            .is_none_or(|value| value != "true")
        {
            return Err(Status::invalid_argument(format!(
                "the request has no metadata {WORKLOAD_API_METADATA}: true"
            )));
        }
        match self.caller.is_authorized {
            true => Ok(()),
            false => Err(Status::permission_denied(format!(
                "no identity for user {}; pass --uid to serve this user",
                self.caller.uid
            ))),
        }
    }

    fn watch_responses<T: Send + 'static>(&self, part: fn(&SvidResponses) -> T) -> ResponseStream<T> {
        Box::pin(WatchStream::new(self.responses.clone()).map(move |responses| Ok(part(&responses))))
    }
}

type ResponseStream<T> = std::pin::Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl SpiffeWorkloadApi for Api {
    type FetchX509SVIDStream = ResponseStream<X509svidResponse>;
    type FetchX509BundlesStream = ResponseStream<X509BundlesResponse>;

    async fn fetch_x509svid(
        &self,
        req: Request<X509svidRequest>,
    ) -> Result<Response<Self::FetchX509SVIDStream>, Status> {
        self.check_request(&req)?;
        Ok(Response::new(self.watch_responses(|responses| responses.svids.clone())))
    }

    async fn fetch_x509_bundles(
        &self,
        req: Request<X509BundlesRequest>,
    ) -> Result<Response<Self::FetchX509BundlesStream>, Status> {
        self.check_request(&req)?;
        Ok(Response::new(
            self.watch_responses(|responses| responses.bundles.clone()),
        ))
    }
}

/// Formats `spiffe://<trust domain>`, without the path.
fn trust_domain(identity: &str) -> String {
    identity.splitn(4, '/').take(3).collect::<Vec<_>>().join("/")
}

fn parse_spiffe_identity(text: &str) -> Result<String, String> {
    match text.parse() {
        Ok(Identity::Uri(_)) => Ok(text.to_owned()),
        Ok(Identity::Dns(_)) => Err("a DNS name; expected spiffe://<trust domain>/<path>".to_owned()),
        Err(err) => Err(err.to_string()),
    }
}

/// Interval at which the files are checked for changes.
const FILE_POLL_INTERVAL: Duration = Duration::from_secs(2);
/// Maximum concurrent connections of one user. A sidecar has one connection, and a second one while it is replaced.
const MAX_CONNECTIONS_PER_USER: usize = 32;
/// Maximum concurrent connections of all unauthorized users together.
const MAX_UNAUTHORIZED_CONNECTIONS: usize = 8;
const UNAUTHORIZED_CONNECTION_TIMEOUT: Duration = Duration::from_secs(1);
const FIRST_BYTE_TIMEOUT: Duration = Duration::from_secs(10);
const ACCEPT_ERROR_BACKOFF: Duration = Duration::from_millis(100);
const MIN_LOG_INTERVAL: Duration = Duration::from_secs(60);

const EXAMPLES: &str = "\
A machine outside of the cluster with the identity spiffe://root.linkerd.cluster.local/vm-1:

  tulle trust create-issuer --identity spiffe://root.linkerd.cluster.local/vm-1 --dir issuer
      run on the machine with the trust anchor's key; copy only the result
  tulle trust serve-workload-api --identity spiffe://root.linkerd.cluster.local/vm-1 \\
      --issuer /etc/tulle/issuer --trust-anchors /etc/tulle/ca.crt --uid 2102

Its sidecar runs as user 2102 and has

  LINKERD2_PROXY_IDENTITY_SPIRE_SOCKET=unix:///run/tulle/workload-api.sock
  LINKERD2_PROXY_IDENTITY_SERVER_ID=spiffe://root.linkerd.cluster.local/vm-1
  LINKERD2_PROXY_IDENTITY_SERVER_NAME=vm-1.cluster.local

With SPIRE on the machine, use the socket of its agent instead. See docs/how-to/virtual-machines.md for details.";

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::UNIX_EPOCH;

    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn args(dir: &Path, identity: &str) -> Args {
        let at = |name: &str| dir.join(name).display().to_string();
        let (issuer, anchors, socket) = (at("issuer"), at("ca.crt"), at("run/api.sock"));
        Line::parse_from([
            "serve",
            "--identity",
            identity,
            "--issuer",
            &issuer,
            "--trust-anchors",
            &anchors,
            "--socket",
            &socket,
        ])
        .args
    }

    fn write_credentials(dir: &Path) {
        let anchor = trust::create_anchor("root", trust::ANCHOR_LIFETIME).unwrap();
        let issuer = trust::create_single_identity_issuer("spiffe://root/vm", trust::ISSUER_LIFETIME, &anchor).unwrap();
        fs::create_dir(dir.join("issuer")).unwrap();
        anchor.write(&dir.join("ca.crt"), &dir.join("ca.key")).unwrap();
        issuer
            .write(&dir.join("issuer/crt.pem"), &dir.join("issuer/key.pem"))
            .unwrap();
    }

    #[test]
    fn an_issuer_that_the_mesh_does_not_trust_is_refused_at_start() {
        let dir = tempfile::tempdir().unwrap();
        write_credentials(dir.path());
        let args = args(dir.path(), "spiffe://root/vm");
        let responses = IssuerFiles::read(&args).unwrap().issue(&args).unwrap();
        assert_eq!(responses.svids.svids.len(), 1);
        assert_eq!(responses.bundles.bundles.keys().collect::<Vec<_>>(), ["spiffe://root"]);
        let foreign = trust::create_anchor("foreign", trust::ANCHOR_LIFETIME).unwrap();
        fs::write(&args.trust_anchors, foreign.certificate).unwrap();
        let error = format!("{:#}", IssuerFiles::read(&args).unwrap().issue(&args).err().unwrap());
        assert!(error.contains("is not verified by the trust anchors"), "{error}");
        let other = self::args(dir.path(), "spiffe://root/other");
        let error = format!("{:#}", IssuerFiles::read(&other).unwrap().issue(&other).err().unwrap());
        assert!(
            error.contains("may not sign a certificate for spiffe://root/other"),
            "{error}"
        );
    }

    #[test]
    fn certificates_are_renewed_by_the_wall_clock() {
        static NOW: AtomicU64 = AtomicU64::new(0);
        let dir = tempfile::tempdir().unwrap();
        write_credentials(dir.path());
        let args = args(dir.path(), "spiffe://root/vm");
        let files = IssuerFiles::read(&args).unwrap();
        let renewal_due = Deadline::after(args.lifetime / 2, || {
            UNIX_EPOCH + Duration::from_secs(NOW.load(Ordering::SeqCst))
        });
        assert!(renew_if_due(&args, &files, &renewal_due).unwrap().is_none());
        // Simulates a suspended machine, whose timers were suspended too.
        NOW.store(1800, Ordering::SeqCst);
        assert!(renew_if_due(&args, &files, &renewal_due).unwrap().is_some());
    }

    #[test]
    fn the_connection_limit_is_per_user() {
        let connection_limits = ConnectionLimits::new(vec![2102, 2103]);
        let permits: Vec<_> = std::iter::from_fn(|| connection_limits.admit(2102)).collect();
        assert_eq!(permits.len(), MAX_CONNECTIONS_PER_USER);
        assert!(permits.iter().all(|(caller, _)| caller.is_authorized));
        // Unauthorized users share their permits.
        let mut uids = 5000..;
        let others: Vec<_> = std::iter::from_fn(|| connection_limits.admit(uids.next()?)).collect();
        assert_eq!(others.len(), MAX_UNAUTHORIZED_CONNECTIONS);
        assert!(others.iter().all(|(caller, _)| !caller.is_authorized));
        assert!(connection_limits.admit(2103).is_some());
        drop(permits);
        assert!(connection_limits.admit(2102).is_some());
    }

    #[test]
    fn only_spiffe_identities_are_served() {
        assert_eq!(
            parse_spiffe_identity("spiffe://root/vm"),
            Ok("spiffe://root/vm".to_owned())
        );
        for refused in ["vm.example.com", "spiffe://", "https://root/vm"] {
            assert!(
                parse_spiffe_identity(refused)
                    .unwrap_err()
                    .contains("spiffe://<trust domain>/<path>")
            );
        }
        assert_eq!(trust_domain("spiffe://root/ns/vm"), "spiffe://root");
        assert_eq!(trust_domain("spiffe://root"), "spiffe://root");
    }

    #[tokio::test]
    async fn a_stale_socket_is_replaced_and_a_socket_in_use_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/api.sock");
        let first = Socket::bind(&path).unwrap();
        let error = Socket::bind(&path).err().unwrap().to_string();
        assert!(error.contains("is in use by another process"), "{error}");
        drop(first);
        assert!(!path.exists());
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        Socket::bind(&path).unwrap();
        fs::write(&path, "x").unwrap();
        assert!(
            Socket::bind(&path)
                .err()
                .unwrap()
                .to_string()
                .contains("is not a socket")
        );
    }
}
