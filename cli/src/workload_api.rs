//! A SPIFFE Workload API for a machine without SPIRE: key, certificate and trust anchors for the sidecar beside it.
//!
//! SPIRE finds out who asks by looking at the process. Here the operator says it: whoever runs under one of the users
//! that are named gets the identities that are named, and nobody else gets any.

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
use tulle_core::due::Due;
use tulle_core::identity::Identity;
use tulle_core::names::WORKLOAD_API_METADATA;
use tulle_proto::workload::spiffe_workload_api_server::{SpiffeWorkloadApi, SpiffeWorkloadApiServer};
use tulle_proto::workload::{X509BundlesRequest, X509BundlesResponse, X509svid, X509svidRequest, X509svidResponse};

#[derive(ClapArgs, Clone, Debug)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Args {
    /// The identity that sidecars get, such as spiffe://root.linkerd.cluster.local/vm-1; several can be given
    #[arg(long = "identity", value_name = "URI", required = true, value_parser = spiffe)]
    identities: Vec<String>,
    /// Where sidecars find the API: LINKERD2_PROXY_IDENTITY_SPIRE_SOCKET=unix://PATH
    #[arg(long, value_name = "PATH", default_value = "/run/tulle/workload-api.sock")]
    socket: PathBuf,
    /// The directory of the issuer that signs, crt.pem and key.pem; read again when it changes
    #[arg(long, value_name = "DIR", default_value = "issuer")]
    issuer: PathBuf,
    /// The trust anchors of the mesh, a PEM bundle; read again when it changes
    #[arg(long, value_name = "FILE", default_value = "ca.crt")]
    trust_anchors: PathBuf,
    /// A user whose processes are served, by its number; several can be given. By default, who runs this
    #[arg(long = "uid", value_name = "UID")]
    uids: Vec<u32>,
    /// How long certificates are good for; they are renewed after half of it
    #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = crate::trust::lifetime)]
    lifetime: Duration,
}

/// Serves until somebody ends it.
pub(crate) fn main(args: &Args) -> anyhow::Result<()> {
    crate::runtime()?.block_on(serve(args))
}

/// What every caller is told now.
#[derive(Clone)]
struct Answers {
    svids: X509svidResponse,
    bundles: X509BundlesResponse,
}

/// What answers are made from.
#[derive(PartialEq)]
struct Files {
    issuer: CertificateAuthorityText,
    anchors: Vec<u8>,
}

#[derive(PartialEq)]
struct CertificateAuthorityText {
    certificate: String,
    key: String,
}

async fn serve(args: &Args) -> anyhow::Result<()> {
    let mut files = Files::read(args)?;
    let (sender, answers) = watch::channel(Arc::new(files.answers(args)?));
    let socket = Socket::bind(&args.socket)?;
    println!(
        "serving {} at unix://{}",
        args.identities.join(", "),
        args.socket.display()
    );
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let users = Users::new(match args.uids.is_empty() {
        true => vec![nix::unistd::Uid::current().as_raw()],
        false => args.uids.clone(),
    });
    descriptors::limit();
    let mut due = Due::after(args.lifetime / 2, SystemTime::now);
    let mut look = interval(LOOK_INTERVAL);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut connections = JoinSet::new();
    let mut told = None;
    let mut accept_at = Instant::now();
    let mut complaints = Complaints::default();
    loop {
        // All branches only wait; an accepted connection is never lost, because `accept` is cancel-safe.
        tokio::select! {
            _ = terminate.recv() => return Ok(()),
            _ = interrupt.recv() => return Ok(()),
            Some(_) = connections.join_next() => {}
            accepted = accept_after(accept_at, &socket.listener) => match accepted {
                Ok((stream, uid)) => match users.admit(uid) {
                    Some((caller, place)) => {
                        let api = Api { caller, answers: answers.clone() };
                        connections.spawn(api.connection(stream, place));
                    }
                    None if users.is_served(uid) => complaints.tell(format_args!(
                        "user {uid} has {MAX_CONNECTIONS_PER_USER} connections already; another one is closed"
                    )),
                    // Who is not served does not fill the log either.
                    None => {}
                },
                Err(error) => {
                    complaints.tell(format_args!("accepting a connection failed: {error}"));
                    // Out of descriptors, most likely: trying again at once would only burn the CPU.
                    accept_at = Instant::now() + ACCEPT_PAUSE;
                }
            },
            _ = look.tick() => match renewed(args, &files, &due) {
                Ok(None) => {}
                Ok(Some((new, answers))) => {
                    files = new;
                    due = Due::after(args.lifetime / 2, SystemTime::now);
                    told = None;
                    sender.send_replace(Arc::new(answers));
                }
                // What was said before stays in force.
                Err(error) => {
                    let text = format!("{error:#}");
                    if told.as_ref() != Some(&text) {
                        eprintln!("not renewed: {text}");
                    }
                    told = Some(text);
                }
            },
        }
    }
}

/// The next connection, and whose it is; none is lost when this is dropped.
async fn accept_after(at: Instant, listener: &UnixListener) -> io::Result<(UnixStream, u32)> {
    sleep_until(at).await;
    let (stream, _) = listener.accept().await?;
    let uid = stream.peer_cred()?.uid();
    Ok((stream, uid))
}

/// New answers, when the files have changed or the certificates are half over.
fn renewed(args: &Args, files: &Files, due: &Due) -> anyhow::Result<Option<(Files, Answers)>> {
    let now = Files::read(args)?;
    if now == *files && !due.is_now() {
        return Ok(None);
    }
    let answers = now.answers(args)?;
    Ok(Some((now, answers)))
}

impl Files {
    fn read(args: &Args) -> anyhow::Result<Self> {
        let authority = CertificateAuthority::read(&args.issuer.join("crt.pem"), &args.issuer.join("key.pem"))
            .context("reading --issuer")?;
        let anchors = &args.trust_anchors;
        Ok(Self {
            issuer: CertificateAuthorityText {
                certificate: authority.certificate,
                key: authority.key,
            },
            anchors: fs::read(anchors).with_context(|| format!("reading --trust-anchors {anchors:?}"))?,
        })
    }

    /// Certificates that lead to the trust anchors; others would be refused by every sidecar.
    fn answers(&self, args: &Args) -> anyhow::Result<Answers> {
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
                .with_context(|| format!("the issuer in {:?} does not lead to the trust anchors", args.issuer))?;
            bundles.bundles.insert(trust_domain(identity), bundle.clone());
            svids.svids.push(X509svid {
                spiffe_id: identity.clone(),
                x509_svid: svid.chain.concat(),
                x509_svid_key: svid.key,
                bundle: bundle.clone(),
                hint: String::new(),
            });
        }
        Ok(Answers { svids, bundles })
    }
}

/// The socket in the file system; removed at the end.
struct Socket {
    listener: UnixListener,
    path: PathBuf,
}

impl Socket {
    fn bind(path: &Path) -> anyhow::Result<Self> {
        if let Some(dir) = path.parent() {
            fs::create_dir_all(dir).with_context(|| format!("making the directory {dir:?}"))?;
        }
        if let Ok(found) = fs::symlink_metadata(path) {
            ensure!(
                found.file_type().is_socket(),
                "{path:?} is there and is no socket; choose another --socket"
            );
            if StdUnixStream::connect(path).is_ok() {
                bail!("{path:?} is served already; end that process or choose another --socket");
            }
            fs::remove_file(path).with_context(|| format!("removing the abandoned socket {path:?}"))?;
        }
        let listener = UnixListener::bind(path).with_context(|| format!("listening on --socket {path:?}"))?;
        // Who may connect is judged by user, for each connection.
        fs::set_permissions(path, Permissions::from_mode(0o666)).with_context(|| format!("opening {path:?}"))?;
        Ok(Self {
            listener,
            path: path.to_owned(),
        })
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        // A socket that stays is found abandoned at the next start.
        let _ = fs::remove_file(&self.path);
    }
}

/// Who is served, and how many connections each user may have. The socket is open to every user of the machine: none of them
/// may take the descriptors of this process from the others.
struct Users {
    served: Vec<(u32, Arc<Semaphore>)>,
    /// Permits for the connections of all other users together. They have no identity, and are told so.
    others: Arc<Semaphore>,
}

impl Users {
    fn new(uids: Vec<u32>) -> Self {
        let places = |uid| (uid, Arc::new(Semaphore::new(MAX_CONNECTIONS_PER_USER)));
        Self {
            served: uids.into_iter().map(places).collect(),
            others: Arc::new(Semaphore::new(MAX_REFUSALS)),
        }
    }

    fn is_served(&self, uid: u32) -> bool {
        self.served.iter().any(|(served, _)| *served == uid)
    }

    /// A place for a connection of this user, if there is one.
    fn admit(&self, uid: u32) -> Option<(Caller, OwnedSemaphorePermit)> {
        let own = self.served.iter().find(|(served, _)| *served == uid);
        let is_served = own.is_some();
        let places = own.map_or(&self.others, |(_, places)| places);
        let place = places.clone().try_acquire_owned().ok()?;
        Some((Caller { uid, is_served }, place))
    }
}

/// Lines on standard error about clients, which clients can provoke at will: at most one a minute.
#[derive(Default)]
struct Complaints {
    last_at: Option<Instant>,
}

impl Complaints {
    fn tell(&mut self, text: std::fmt::Arguments<'_>) {
        if self.last_at.is_none_or(|at| at.elapsed() >= COMPLAINT_INTERVAL) {
            eprintln!("{text}");
            self.last_at = Some(Instant::now());
        }
    }
}

/// The API as one connection sees it.
#[derive(Clone)]
struct Api {
    caller: Caller,
    answers: watch::Receiver<Arc<Answers>>,
}

#[derive(Clone, Copy)]
struct Caller {
    uid: u32,
    is_served: bool,
}

impl Api {
    /// Serves a connection for as long as it may last; its place is free again at the end.
    async fn connection(self, stream: UnixStream, _place: OwnedSemaphorePermit) {
        match self.caller.is_served {
            true => {
                // An end of the stream, or an error, is for the server to see.
                if timeout(FIRST_BYTE_TIMEOUT, stream.readable()).await.is_ok() {
                    self.serve(stream).await;
                }
            }
            // Long enough to ask and to be told why not.
            false => drop(timeout(REFUSAL_TIMEOUT, self.serve(stream)).await),
        }
    }

    async fn serve(self, stream: UnixStream) {
        let api = SpiffeWorkloadApiServer::new(self);
        let service = service_fn(move |req| api.clone().oneshot(req));
        // Sidecars come and go.
        let _ = http2::Builder::new(TokioExecutor::new())
            .serve_connection(TokioIo::new(stream), service)
            .await;
    }

    fn check<T>(&self, req: &Request<T>) -> Result<(), Status> {
        if req
            .metadata()
            .get(WORKLOAD_API_METADATA)
            .is_none_or(|value| value != "true")
        {
            return Err(Status::invalid_argument(format!(
                "the request has no metadata {WORKLOAD_API_METADATA}: true"
            )));
        }
        match self.caller.is_served {
            true => Ok(()),
            false => Err(Status::permission_denied(format!(
                "no identity for user {}; --uid names those who have one",
                self.caller.uid
            ))),
        }
    }

    fn stream<T: Send + 'static>(&self, part: fn(&Answers) -> T) -> Answered<T> {
        Box::pin(WatchStream::new(self.answers.clone()).map(move |answers| Ok(part(&answers))))
    }
}

type Answered<T> = std::pin::Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl SpiffeWorkloadApi for Api {
    type FetchX509SVIDStream = Answered<X509svidResponse>;
    type FetchX509BundlesStream = Answered<X509BundlesResponse>;

    async fn fetch_x509svid(
        &self,
        req: Request<X509svidRequest>,
    ) -> Result<Response<Self::FetchX509SVIDStream>, Status> {
        self.check(&req)?;
        Ok(Response::new(self.stream(|answers| answers.svids.clone())))
    }

    async fn fetch_x509_bundles(
        &self,
        req: Request<X509BundlesRequest>,
    ) -> Result<Response<Self::FetchX509BundlesStream>, Status> {
        self.check(&req)?;
        Ok(Response::new(self.stream(|answers| answers.bundles.clone())))
    }
}

/// `spiffe://<trust domain>`, without the path.
fn trust_domain(identity: &str) -> String {
    identity.splitn(4, '/').take(3).collect::<Vec<_>>().join("/")
}

fn spiffe(text: &str) -> Result<String, String> {
    match text.parse() {
        Ok(Identity::Uri(_)) => Ok(text.to_owned()),
        Ok(Identity::Dns(_)) => Err("a DNS name; expected spiffe://<trust domain>/<path>".to_owned()),
        Err(err) => Err(err.to_string()),
    }
}

/// How late a changed file is noticed.
const LOOK_INTERVAL: Duration = Duration::from_secs(2);
/// A sidecar has one, and another one while it is replaced.
const MAX_CONNECTIONS_PER_USER: usize = 32;
/// Connections of users who are not served, at a time and of all of them.
const MAX_REFUSALS: usize = 8;
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(1);
const FIRST_BYTE_TIMEOUT: Duration = Duration::from_secs(10);
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
const COMPLAINT_INTERVAL: Duration = Duration::from_secs(60);

const EXAMPLE: &str = "\
A machine outside of the cluster that serves as spiffe://root.linkerd.cluster.local/vm-1:

  tulle trust create-issuer --identity spiffe://root.linkerd.cluster.local/vm-1 --dir issuer
      where the trust anchor's key is; copy only the result
  tulle trust serve-workload-api --identity spiffe://root.linkerd.cluster.local/vm-1 \\
      --issuer /etc/tulle/issuer --trust-anchors /etc/tulle/ca.crt --uid 2102

Its sidecar runs as user 2102 and has

  LINKERD2_PROXY_IDENTITY_SPIRE_SOCKET=unix:///run/tulle/workload-api.sock
  LINKERD2_PROXY_IDENTITY_SERVER_ID=spiffe://root.linkerd.cluster.local/vm-1
  LINKERD2_PROXY_IDENTITY_SERVER_NAME=vm-1.cluster.local

With SPIRE on the machine, name the socket of its agent instead. docs/vm.md has the whole story.";

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

    fn credentials(dir: &Path) {
        let anchor = trust::create_anchor("root", trust::ANCHOR_LIFETIME).unwrap();
        let issuer = trust::create_workload_issuer("spiffe://root/vm", trust::ISSUER_LIFETIME, &anchor).unwrap();
        fs::create_dir(dir.join("issuer")).unwrap();
        anchor.write(&dir.join("ca.crt"), &dir.join("ca.key")).unwrap();
        issuer
            .write(&dir.join("issuer/crt.pem"), &dir.join("issuer/key.pem"))
            .unwrap();
    }

    #[test]
    fn an_issuer_that_the_mesh_does_not_trust_is_refused_at_start() {
        let dir = tempfile::tempdir().unwrap();
        credentials(dir.path());
        let args = args(dir.path(), "spiffe://root/vm");
        let answers = Files::read(&args).unwrap().answers(&args).unwrap();
        assert_eq!(answers.svids.svids.len(), 1);
        assert_eq!(answers.bundles.bundles.keys().collect::<Vec<_>>(), ["spiffe://root"]);
        let foreign = trust::create_anchor("foreign", trust::ANCHOR_LIFETIME).unwrap();
        fs::write(&args.trust_anchors, foreign.certificate).unwrap();
        let error = format!("{:#}", Files::read(&args).unwrap().answers(&args).err().unwrap());
        assert!(error.contains("does not lead to the trust anchors"), "{error}");
        let other = self::args(dir.path(), "spiffe://root/other");
        let error = format!("{:#}", Files::read(&other).unwrap().answers(&other).err().unwrap());
        assert!(
            error.contains("may not sign a certificate for spiffe://root/other"),
            "{error}"
        );
    }

    #[test]
    fn certificates_are_renewed_by_the_time_of_day() {
        static NOW: AtomicU64 = AtomicU64::new(0);
        let dir = tempfile::tempdir().unwrap();
        credentials(dir.path());
        let args = args(dir.path(), "spiffe://root/vm");
        let files = Files::read(&args).unwrap();
        let due = Due::after(args.lifetime / 2, || {
            UNIX_EPOCH + Duration::from_secs(NOW.load(Ordering::SeqCst))
        });
        assert!(renewed(&args, &files, &due).unwrap().is_none());
        // As on a machine that was suspended, and its timers with it.
        NOW.store(1800, Ordering::SeqCst);
        assert!(renewed(&args, &files, &due).unwrap().is_some());
    }

    #[test]
    fn no_user_takes_the_places_of_another() {
        let users = Users::new(vec![2102, 2103]);
        let places: Vec<_> = std::iter::from_fn(|| users.admit(2102)).collect();
        assert_eq!(places.len(), MAX_CONNECTIONS_PER_USER);
        assert!(places.iter().all(|(caller, _)| caller.is_served));
        // Those who are not served share theirs.
        let mut uids = 5000..;
        let others: Vec<_> = std::iter::from_fn(|| users.admit(uids.next()?)).collect();
        assert_eq!(others.len(), MAX_REFUSALS);
        assert!(others.iter().all(|(caller, _)| !caller.is_served));
        assert!(users.admit(2103).is_some());
        drop(places);
        assert!(users.admit(2102).is_some());
    }

    #[test]
    fn only_spiffe_identities_are_served() {
        assert_eq!(spiffe("spiffe://root/vm"), Ok("spiffe://root/vm".to_owned()));
        for refused in ["vm.example.com", "spiffe://", "https://root/vm"] {
            assert!(spiffe(refused).unwrap_err().contains("spiffe://<trust domain>/<path>"));
        }
        assert_eq!(trust_domain("spiffe://root/ns/vm"), "spiffe://root");
        assert_eq!(trust_domain("spiffe://root"), "spiffe://root");
    }

    #[tokio::test]
    async fn an_abandoned_socket_is_taken_over_and_one_in_use_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/api.sock");
        let first = Socket::bind(&path).unwrap();
        let error = Socket::bind(&path).err().unwrap().to_string();
        assert!(error.contains("is served already"), "{error}");
        drop(first);
        assert!(!path.exists());
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        Socket::bind(&path).unwrap();
        fs::write(&path, "x").unwrap();
        assert!(Socket::bind(&path).err().unwrap().to_string().contains("is no socket"));
    }
}
