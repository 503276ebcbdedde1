//! The telemetry API behind the API server: only clients that RBAC permits can use it.

use serde_json::json;
use tokio::process::Command;
use tokio::task::JoinHandle;
use tulle_control::app::App;
use tulle_control::cmd;
use tulle_control::config::Config;
use tulle_tests::charts::install_custom_resources;
use tulle_tests::cluster::ApiServer;
use tulle_tests::commands;
use tulle_tests::eventually::eventually;
use tulle_tests::programs::{built_binary, find};

/// An API server with the telemetry service of a control plane.
struct TelemetryFixture {
    server: ApiServer,
    port: u16,
    running: JoinHandle<()>,
}

impl Drop for TelemetryFixture {
    fn drop(&mut self) {
        self.running.abort();
    }
}

impl TelemetryFixture {
    async fn start() -> Self {
        let server = ApiServer::start().await.unwrap();
        install_custom_resources(&server).await.unwrap();
        for namespace in ["linkerd", "shop", "other"] {
            server.create_namespace(namespace).await.unwrap();
        }
        let anchor = tulle_control::trust::create_anchor("root", tulle_control::trust::ANCHOR_LIFETIME).unwrap();
        let (anchors, key) = (server.dir().join("anchors.crt"), server.dir().join("anchors.key"));
        anchor.write(&anchors, &key).unwrap();
        let line = [
            "tulle-control".to_owned(),
            "telemetry".to_owned(),
            format!("-kubeconfig={}", server.kubeconfig().display()),
            format!("-trust-anchors={}", anchors.display()),
            "-telemetry-addr=127.0.0.1:0".to_owned(),
            "-admin-addr=127.0.0.1:0".to_owned(),
        ];
        let command = cmd::Command::parse_from_line(line.map(Into::into)).unwrap();
        let mut app = App::build(Config::from_command(&command).unwrap()).await.unwrap();
        let port = app.addrs().telemetry.unwrap().port();
        let running = tokio::spawn(async move {
            app.run_until(std::future::pending()).await.unwrap();
        });
        let fixture = Self { server, port, running };
        fixture.register().await;
        fixture
    }

    /// As the chart does, except for the target of the Service, because there is no cluster network.
    async fn register(&self) {
        let objects = json!({ "apiVersion": "v1", "kind": "List", "items": [
            {
                "apiVersion": "v1", "kind": "Service",
                "metadata": { "name": "linkerd-telemetry", "namespace": "linkerd" },
                "spec": { "type": "ExternalName", "externalName": "localhost" },
            },
            {
                "apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService",
                "metadata": { "name": "v1alpha1.telemetry.tulle.dev" },
                "spec": {
                    "group": "telemetry.tulle.dev", "version": "v1alpha1",
                    "groupPriorityMinimum": 1000, "versionPriority": 100,
                    "service": { "name": "linkerd-telemetry", "namespace": "linkerd", "port": self.port },
                },
            },
            {
                "apiVersion": "v1", "kind": "Pod",
                "metadata": { "name": "web", "namespace": "shop" },
                "spec": { "containers": [{ "name": "web", "image": "web" }] },
            },
        ] });
        let file = self.server.dir().join("objects.json");
        std::fs::write(&file, objects.to_string()).unwrap();
        self.server
            .kubectl(&["apply", "-f", file.to_str().unwrap()])
            .await
            .unwrap();
        let running = r#"{"status": {"phase": "Running", "podIP": "10.23.0.9"}}"#;
        let patch = [
            "patch",
            "pod",
            "web",
            "-n",
            "shop",
            "--subresource=status",
            "--type=merge",
            "-p",
            running,
        ];
        self.server.kubectl(&patch).await.unwrap();
        let resources = eventually("the API is served", async || {
            let raw = ["get", "--raw", "/apis/telemetry.tulle.dev/v1alpha1"];
            self.server.kubectl(&raw).await.ok()
        });
        assert!(resources.await.contains("taps"));
    }

    /// Runs `tulle …` with this kubeconfig.
    async fn tulle(&self, kubeconfig: &std::path::Path, line: &str) -> (bool, String) {
        let mut tulle = Command::new(built_binary("tulle").unwrap());
        tulle.args(line.split(' ')).env("KUBECONFIG", kubeconfig);
        let output = commands::output(line, tulle).await.unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8(text).unwrap())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn telemetry_is_available_to_users_that_rbac_permits() {
    let fixture = TelemetryFixture::start().await;
    let server = &fixture.server;
    // The administrator authenticates with a client certificate, not with a token.
    let admin = server.kubeconfig();
    let row = eventually("the pod is known", async || {
        let (done, text) = fixture.tulle(&admin, "stat pod -n shop").await;
        assert!(done, "{text}");
        text.lines().find(|line| line.starts_with("web ")).map(str::to_owned)
    });
    let row = row.await;
    assert_eq!(row.split_whitespace().collect::<Vec<_>>()[..3], ["web", "0/1", "-"]);

    let unprivileged = server.service_account_kubeconfig("default", "nobody").await.unwrap();
    let refused = async |line: &str, resource: &str| {
        let (done, text) = fixture.tulle(&unprivileged, line).await;
        assert!(
            !done && text.contains("system:serviceaccount:default:nobody"),
            "{line}: {text}"
        );
        assert!(
            text.contains(resource) && text.contains("kubectl create "),
            "{line}: {text}"
        );
    };
    refused("stat -n shop", "workloads.telemetry.tulle.dev").await;
    refused("stat -A", "clusterrole").await;
    refused("edges -n shop", "edges.telemetry.tulle.dev").await;
    refused("tap pod/web -n shop", "--verb=watch").await;

    // The permissions in the hint are the missing ones.
    for line in [
        "create role telemetry --verb=list --resource=edges.telemetry.tulle.dev -n shop",
        "create rolebinding telemetry --role=telemetry --serviceaccount=default:nobody -n shop",
    ] {
        server.kubectl(&line.split(' ').collect::<Vec<_>>()).await.unwrap();
    }
    eventually("the binding is effective", async || {
        let (done, _) = fixture.tulle(&unprivileged, "edges -n shop").await;
        done.then_some(())
    })
    .await;
    refused("edges -n other", "edges.telemetry.tulle.dev").await;
    refused("edges -A", "clusterrole").await;
    refused("stat -n shop", "workloads.telemetry.tulle.dev").await;
    refused("tap pod/web -n shop", "taps.telemetry.tulle.dev").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_front_proxy_certificate_of_the_api_server_is_accepted() {
    let fixture = TelemetryFixture::start().await;
    let url = format!(
        "https://localhost:{}/apis/telemetry.tulle.dev/v1alpha1/namespaces/shop/workloads",
        fixture.port
    );
    let pki = fixture.server.ca().parent().unwrap().to_owned();
    let request_status = async |name: Option<&str>| {
        let mut curl = Command::new(find("curl").unwrap());
        curl.args([
            "-sk",
            "--max-time",
            "5",
            "-H",
            "X-Remote-User: admin",
            "-o",
            "/dev/null",
        ]);
        curl.args(["-w", "%{http_code}", &url]);
        if let Some(name) = name {
            curl.arg("--cert").arg(pki.join(format!("{name}.crt")));
            curl.arg("--key").arg(pki.join(format!("{name}.key")));
        }
        String::from_utf8(curl.output().await.unwrap().stdout).unwrap()
    };
    assert_eq!(request_status(Some("front-proxy-client")).await, "200");
    for name in [None, Some("admin")] {
        assert_eq!(request_status(name).await, "000", "{name:?}");
    }
}
