//! An API server, and an identity service with the permissions of its chart.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use k8s_openapi::api::events::v1::Event;
use kube::api::{Api, ListParams};
use rcgen::{CertificateParams, DistinguishedName, KeyPair, SanType};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::{Code, Status};
use tulle_control::app::{Addrs, App};
use tulle_control::cmd::Command;
use tulle_control::config::Config;
use tulle_control::tls::anchors::TrustAnchors;
use tulle_control::tls::client::{self, Channel, TlsServer};
use tulle_control::trust::{self, CertificateAuthority};
use tulle_core::addr::Addr;
use tulle_proto::identity::identity_client::IdentityClient;
use tulle_proto::identity::{CertifyRequest, CertifyResponse};
use tulle_tests::cluster::ApiServer;
use tulle_tests::eventually::eventually;

pub(super) const WEB: &str = "web.shop.serviceaccount.identity.linkerd.cluster.local";
pub(super) const IDENTITY: &str = "linkerd-identity.linkerd.serviceaccount.identity.linkerd.cluster.local";
pub(super) const AUDIENCE: &str = "identity.l5d.io";

/// The API server, the mounted files and the service, all running.
pub(super) struct IdentityFixture {
    service: Service,
    pub(super) anchor: CertificateAuthority,
    pub(super) mounts: Mounts,
    pub(super) api: ApiServer,
}

/// An identity service in this process, stopped when dropped.
pub(super) struct Service {
    addrs: Addrs,
    end: Option<oneshot::Sender<()>>,
    _task: JoinHandle<()>,
}

/// Directories as kubelets mount Secrets and ConfigMaps: files behind a symbolic link that is replaced atomically.
pub(super) struct Mounts {
    dir: PathBuf,
}

impl IdentityFixture {
    /// Uses the file names of the Secret in Linkerd's chart.
    pub(super) async fn new() -> Self {
        Self::with_file_names(["crt.pem", "key.pem"]).await
    }

    pub(super) async fn with_file_names(names: [&str; 2]) -> Self {
        let api = ApiServer::start().await.unwrap();
        for namespace in ["linkerd", "shop"] {
            api.create_namespace(namespace).await.unwrap();
        }
        grant_permissions(&api).await;
        let mounts = Mounts {
            dir: api.dir().join("mounts"),
        };
        let anchor = trust::create_anchor("root", trust::ANCHOR_LIFETIME).unwrap();
        let issuer = trust::create_issuer("issuer", trust::ISSUER_LIFETIME, &anchor).unwrap();
        mounts.swap("trust-roots", &[("ca-bundle.crt", &anchor.certificate)]);
        let [certificate, key] = names;
        mounts.swap("issuer", &[(certificate, &issuer.certificate), (key, &issuer.key)]);
        let kubeconfig = api
            .service_account_kubeconfig("linkerd", "linkerd-identity")
            .await
            .unwrap();
        let service = Service::start(&mounts, &kubeconfig).await.unwrap();
        let fixture = Self {
            service,
            anchor,
            mounts,
            api,
        };
        fixture.wait_until_ready().await;
        fixture
    }

    /// Restarts the service with another API server.
    pub(super) async fn restart_with(&mut self, api: &ApiServer) {
        api.create_namespace("linkerd").await.unwrap();
        grant_permissions(api).await;
        let kubeconfig = api
            .service_account_kubeconfig("linkerd", "linkerd-identity")
            .await
            .unwrap();
        self.service = Service::start(&self.mounts, &kubeconfig).await.unwrap();
        self.wait_until_ready().await;
    }

    /// Replaces the running service.
    pub(super) fn replace(&mut self, service: Service) {
        self.service = service;
    }

    pub(super) async fn wait_until_ready(&self) {
        eventually("the service is ready", async || {
            (self.admin("/ready").await.0 == 200).then_some(())
        })
        .await;
    }

    /// Sends a request to the admin server and returns status and text.
    pub(super) async fn admin(&self, path: &str) -> (u16, String) {
        let stream = TcpStream::connect(self.service.addrs.admin.unwrap()).await.unwrap();
        let answer = tulle_tests::client::get(stream, path).await;
        (answer.status.as_u16(), answer.text())
    }

    /// Connects as a proxy does, with the mounted trust anchors.
    pub(super) async fn connect(&self) -> Result<Channel, client::Error> {
        let path = self.mounts.dir.join("trust-roots/ca-bundle.crt");
        let peer = TlsServer {
            addr: &Addr::Socket(self.service.addrs.identity.unwrap()),
            name: IDENTITY,
            identity: None,
            anchors: &TrustAnchors::read(&path).unwrap(),
        };
        client::connect(&peer, None).await
    }

    pub(super) async fn certify(&self, req: CertifyRequest) -> Result<CertifyResponse, Status> {
        let channel = self
            .connect()
            .await
            .map_err(|err| Status::unavailable(format!("{err:?}")))?;
        Self::certify_over(channel, req).await
    }

    pub(super) async fn certify_over(channel: Channel, req: CertifyRequest) -> Result<CertifyResponse, Status> {
        let mut client = IdentityClient::new(channel);
        client.certify(req).await.map(tonic::Response::into_inner)
    }

    /// The request of the proxy of `web` in `shop`.
    pub(super) async fn valid_request(&self) -> CertifyRequest {
        CertifyRequest {
            identity: WEB.to_owned(),
            token: self.api.token("shop", "web", &[AUDIENCE]).await.unwrap().into_bytes(),
            certificate_signing_request: csr(&[dns(WEB)], &KeyPair::generate().unwrap()),
        }
    }

    /// Sends a request that must be refused with this code and reason, and then a valid one that must succeed.
    pub(super) async fn assert_refused(&self, req: CertifyRequest, code: Code, reason: &str) {
        let status = self.certify(req).await.unwrap_err();
        assert!(
            status.code() == code && status.message().contains(reason),
            "{status:?} is not {code:?} with {reason:?}"
        );
        self.certify(self.valid_request().await).await.unwrap();
    }

    /// Waits for an event with this reason.
    pub(super) async fn event(&self, namespace: &str, reason: &str) -> Event {
        let events: Api<Event> = Api::namespaced(self.api.client(), namespace);
        eventually(&format!("there is an event {reason}"), async || {
            let found = events.list(&ListParams::default()).await.unwrap();
            found.into_iter().find(|event| event.reason.as_deref() == Some(reason))
        })
        .await
    }
}

impl Service {
    pub(super) async fn start(mounts: &Mounts, kubeconfig: &Path) -> anyhow::Result<Self> {
        let mut line: Vec<OsString> = vec!["tulle-control".into(), "identity".into()];
        for (flag, path) in [
            ("-kubeconfig", kubeconfig.to_owned()),
            ("-issuer", mounts.dir.join("issuer")),
            ("-trust-anchors", mounts.dir.join("trust-roots/ca-bundle.crt")),
        ] {
            line.extend([flag.into(), path.into()]);
        }
        line.extend(
            [
                "-addr=127.0.0.1:0",
                "-admin-addr=127.0.0.1:0",
                "-cluster-domain=cluster.local",
            ]
            .map(OsString::from),
        );
        let config = Config::from_command(&Command::parse_from_line(line)?)?;
        let mut app = App::build(config).await?;
        let (end_tx, end_rx) = oneshot::channel::<()>();
        let addrs = app.addrs();
        let task = tokio::spawn(async move {
            let end = async {
                // An error means that the sender was dropped, which also means the end.
                let _ = end_rx.await;
                Ok(())
            };
            app.run_until(end).await.unwrap();
            app.drain().await;
        });
        Ok(Self {
            addrs,
            end: Some(end_tx),
            _task: task,
        })
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        drop(self.end.take());
    }
}

impl Mounts {
    /// Replaces the files of a mount: writes a new directory, then renames the link.
    pub(super) fn swap(&self, mount: &str, files: &[(&str, &str)]) {
        static VERSIONS: AtomicU32 = AtomicU32::new(0);
        let dir = self.dir.join(mount);
        let version = format!("..version-{}", VERSIONS.fetch_add(1, Ordering::Relaxed));
        fs::create_dir_all(dir.join(&version)).unwrap();
        for (name, text) in files {
            fs::write(dir.join(&version).join(name), text).unwrap();
        }
        let before = fs::read_link(dir.join("..data")).ok();
        symlink(&version, dir.join("..data_tmp")).unwrap();
        fs::rename(dir.join("..data_tmp"), dir.join("..data")).unwrap();
        for (name, _) in files {
            if before.is_none() {
                symlink(Path::new("..data").join(name), dir.join(name)).unwrap();
            }
        }
        if let Some(before) = before {
            fs::remove_dir_all(dir.join(before)).unwrap();
        }
    }
}

/// Grants the permissions of the chart's ClusterRole.
async fn grant_permissions(api: &ApiServer) {
    for args in [
        &[
            "create",
            "clusterrole",
            "identity",
            "--verb=create",
            "--resource=tokenreviews.authentication.k8s.io",
        ][..],
        &[
            "create",
            "clusterrole",
            "events",
            "--verb=create,patch",
            "--resource=events.events.k8s.io",
        ],
        &[
            "create",
            "clusterrolebinding",
            "identity",
            "--clusterrole=identity",
            "--serviceaccount=linkerd:linkerd-identity",
        ],
        &[
            "create",
            "clusterrolebinding",
            "events",
            "--clusterrole=events",
            "--serviceaccount=linkerd:linkerd-identity",
        ],
    ] {
        api.kubectl(args).await.unwrap();
    }
}

pub(super) fn dns(name: &str) -> SanType {
    SanType::DnsName(name.try_into().unwrap())
}

/// A certificate signing request without a common name.
pub(super) fn csr(sans: &[SanType], key: &KeyPair) -> Vec<u8> {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.subject_alt_names = sans.to_vec();
    params.serialize_request(key).unwrap().der().to_vec()
}
