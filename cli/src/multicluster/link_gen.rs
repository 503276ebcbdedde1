//! `tulle multicluster link-gen`: reads a cluster that exports Services, and prints what a cluster that mirrors them needs.

use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context as _, anyhow, ensure};
use k8s_openapi::ByteString;
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Secret, Service, ServiceAccount};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::api::{ListParams, PostParams};
use kube::{Api, Config, ResourceExt as _};
use serde_json::{Value, json};
use tulle_control::kubernetes::remote_credentials::secret_name;
use tulle_control::resources::labels::Selector;
use tulle_core::dns_names::is_dns_label;
use tulle_core::duration;
use tulle_core::names::{annotation, label, multicluster};

use super::extension::{CREDENTIALS_SECRET_TYPE, DEFAULT_NAMESPACE, credentials_permissions};
use crate::install::manifests::{Output, format_manifests};
use crate::kubernetes::{self, Cluster, reason};
use crate::{config, runtime};

#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Args {
    /// The name that this cluster gets in the other one: mirrors are named <service>-<name>
    #[arg(long, value_name = "NAME")]
    pub(super) cluster_name: String,
    /// The namespace of the account, and of the Link in the other cluster
    #[arg(long, value_name = "NAMESPACE", default_value = DEFAULT_NAMESPACE)]
    pub(super) namespace: String,
    /// The account with which the other cluster reads this one
    #[arg(
        long,
        value_name = "NAME",
        default_value = "linkerd-service-mirror-remote-access-default"
    )]
    service_account_name: String,
    /// Request a token that expires after this time, such as 90d, instead of reading the one of a Secret, which does not expire
    #[arg(long, value_name = "DURATION", value_parser = parse_token_duration)]
    token_duration: Option<Duration>,
    /// The URL at which the other cluster reaches this API server [default: that of the kubeconfig]
    #[arg(long, value_name = "URL")]
    api_server_address: Option<String>,
    /// Whether the other cluster sends through the gateway; otherwise it has to reach pods
    #[arg(long, value_name = "BOOL", default_value_t = true, num_args = 0..=1, require_equals = true, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub(super) gateway: bool,
    /// The Service of the gateway
    #[arg(long, value_name = "NAME", default_value = "linkerd-gateway")]
    gateway_name: String,
    /// The namespace of the gateway
    #[arg(long, value_name = "NAMESPACE", default_value = DEFAULT_NAMESPACE)]
    gateway_namespace: String,
    /// Addresses at which the other cluster reaches the gateway, comma-separated [default: those of the load balancer]
    #[arg(long, value_name = "ADDRESSES", default_value = "", hide_default_value = true)]
    gateway_addresses: String,
    /// The port at which the other cluster reaches the gateway [default: that of the Service, or its node port]
    #[arg(long, value_name = "PORT")]
    gateway_port: Option<u16>,
    /// How long the other cluster waits for the response to a probe of the gateway, such as 5s [default: 30s]
    #[arg(long, value_name = "DURATION", value_parser = parse_probe_timeout)]
    probe_timeout: Option<Duration>,
    /// After how many failed probes in a row the other cluster sends nothing to the gateway [default: 3]
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..))]
    probe_failure_threshold: Option<u32>,
    /// The Services whose mirrors send through the gateway
    #[arg(short = 'l', long, value_name = "LABELS", default_value = DEFAULT_SELECTOR)]
    selector: String,
    /// The Services whose mirrors send directly to their pods
    #[arg(
        long,
        value_name = "LABELS",
        default_value = "mirror.linkerd.io/exported=remote-discovery"
    )]
    remote_discovery_selector: String,
    /// The Services that are members of federated Services
    #[arg(long, value_name = "LABELS", default_value = "mirror.linkerd.io/federated=member")]
    federated_service_selector: String,
    /// Annotations that mirrors do not get, comma-separated
    #[arg(long, value_name = "ANNOTATIONS", default_value = "", hide_default_value = true)]
    excluded_annotations: String,
    /// Labels that mirrors do not get, comma-separated
    #[arg(long, value_name = "LABELS", default_value = "", hide_default_value = true)]
    excluded_labels: String,
    /// Output format of the manifests
    #[arg(short, long, value_enum, default_value_t = Output::Yaml)]
    pub(super) output: Output,
}

/// The gateway of a Link.
#[derive(Debug, PartialEq)]
struct Gateway {
    addresses: String,
    port: u16,
    identity: String,
    probe_path: String,
    probe_port: u16,
    /// As a Go duration.
    probe_period: String,
}

/// The data of the cluster that exports Services. It is the target of the Link.
struct Target {
    cluster_domain: String,
    trust_domain: String,
    kubeconfig: String,
    gateway: Option<Gateway>,
}

/// Prints the manifests.
///
/// # Errors
/// Fails if a flag is invalid, or if an object of the cluster is missing or incomplete.
pub(crate) fn main(args: &Args, flags: &kubernetes::Flags) -> anyhow::Result<()> {
    crate::print(&format_manifests(&link_manifests(args, flags)?, args.output)?)
}

/// Reads the cluster, and returns the manifests for the other one.
///
/// # Errors
/// Fails if a flag is invalid, or if an object of the cluster is missing or incomplete.
pub(super) fn link_manifests(args: &Args, flags: &kubernetes::Flags) -> anyhow::Result<Vec<Value>> {
    check_args(args)?;
    let target = runtime()?.block_on(async {
        let access = flags.config().await?;
        let cluster = flags.connect().await?;
        read_target(args, &cluster, &access).await
    })?;
    manifests(args, &target, &flags.linkerd_namespace)
}

/// Parses the duration of a token, which is at least [`MIN_TOKEN_DURATION`], the minimum of Kubernetes.
fn parse_token_duration(text: &str) -> Result<Duration, String> {
    match duration::parse(text) {
        Ok(wanted) if wanted >= MIN_TOKEN_DURATION => Ok(wanted),
        Ok(_) => Err("Kubernetes creates no token for less than 10m; expected a duration such as 90d".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

fn parse_probe_timeout(text: &str) -> Result<Duration, String> {
    match duration::parse(text) {
        Ok(timeout) if !timeout.is_zero() => Ok(timeout),
        Ok(_) => Err("without a time, each probe fails; expected a duration such as 5s".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

fn check_args(args: &Args) -> anyhow::Result<()> {
    let name = &args.cluster_name;
    ensure!(
        is_dns_label(name) && name.len() <= MAX_CLUSTER_NAME_LEN,
        "--cluster-name {name:?} is not a DNS label of at most {MAX_CLUSTER_NAME_LEN} characters; use lower-case letters, digits and -, \
         such as `east`"
    );
    if name.len() > MAX_RECOMMENDED_CLUSTER_NAME_LEN {
        eprintln!(
            "tulle: the name {name} has {} characters; Services whose name has more than {} characters cannot be \
             mirrored, because a mirror's name has at most 63",
            name.len(),
            62 - name.len()
        );
    }
    for (flag, is_set) in [
        ("--selector", args.selector != DEFAULT_SELECTOR),
        ("--gateway-addresses", !args.gateway_addresses.is_empty()),
        ("--gateway-port", args.gateway_port.is_some()),
        ("--probe-timeout", args.probe_timeout.is_some()),
        ("--probe-failure-threshold", args.probe_failure_threshold.is_some()),
    ] {
        ensure!(
            args.gateway || !is_set,
            "{flag} has no effect with --gateway=false; remove one of the two"
        );
    }
    for (flag, selector) in [
        ("--selector", &args.selector),
        ("--remote-discovery-selector", &args.remote_discovery_selector),
        ("--federated-service-selector", &args.federated_service_selector),
    ] {
        parse_selector(selector).with_context(|| format!("{flag} {selector:?}"))?;
    }
    Ok(())
}

async fn read_target(args: &Args, cluster: &Cluster, access: &Config) -> anyhow::Result<Target> {
    let values = config::values(cluster).await?;
    let domain = |key: &str| {
        values[key]
            .as_str()
            .filter(|domain| !domain.is_empty())
            .map(str::to_owned)
    };
    let cluster_domain = domain("clusterDomain").unwrap_or_else(|| "cluster.local".to_owned());
    Ok(Target {
        trust_domain: domain("identityTrustDomain").unwrap_or_else(|| cluster_domain.clone()),
        cluster_domain,
        kubeconfig: render_kubeconfig(args, access, &read_token(args, cluster).await?)?,
        gateway: match args.gateway {
            true => Some(gateway(args, &gateway_service(args, cluster).await?)?),
            false => None,
        },
    })
}

/// The token of the kubeconfig: with `--token-duration` a new one that expires, otherwise the token in the Secret of the account.
async fn read_token(args: &Args, cluster: &Cluster) -> anyhow::Result<String> {
    let (namespace, name) = (&args.namespace, &args.service_account_name);
    let accounts: Api<ServiceAccount> = Api::namespaced(cluster.client.clone(), namespace);
    let account = accounts.get_opt(name).await;
    let account = account.map_err(|error| anyhow!("reading ServiceAccount {namespace}/{name}: {}", reason(&error)))?;
    ensure!(
        account.is_some(),
        "there is no ServiceAccount {namespace}/{name}; create it by `tulle multicluster allow --service-account-name {name}`, or \
         name another by --service-account-name"
    );
    match args.token_duration {
        Some(wanted) => request_token(args, &accounts, wanted).await,
        None => read_secret(args, cluster).await,
    }
}

/// Requests a token, and prints when it expires: the API server can have a lower limit than the wanted duration.
async fn request_token(args: &Args, accounts: &Api<ServiceAccount>, wanted: Duration) -> anyhow::Result<String> {
    let account = format!("ServiceAccount {}/{}", args.namespace, args.service_account_name);
    let request = TokenRequest {
        spec: TokenRequestSpec {
            expiration_seconds: Some(i64::try_from(wanted.as_secs()).unwrap_or(i64::MAX)),
            ..TokenRequestSpec::default()
        },
        ..TokenRequest::default()
    };
    let response = accounts
        .create_token_request(&args.service_account_name, &PostParams::default(), &request)
        .await;
    let response = response.map_err(|error| anyhow!("requesting a token of {account}: {}", reason(&error)))?;
    let issued = response
        .status
        .with_context(|| format!("the API server has not returned a token of {account}"))?;
    eprintln!(
        "tulle: the token expires at {}; run this command again before, and apply its output",
        issued.expiration_timestamp.0
    );
    Ok(issued.token)
}

/// The token in a Secret of the account.
async fn read_secret(args: &Args, cluster: &Cluster) -> anyhow::Result<String> {
    let (namespace, name) = (&args.namespace, &args.service_account_name);
    let secrets: Api<Secret> = Api::namespaced(cluster.client.clone(), namespace);
    let tokens = ListParams::default().fields("type=kubernetes.io/service-account-token");
    let secrets = cluster.list(&secrets, &tokens).await;
    let secrets = secrets.map_err(|error| anyhow!("listing Secrets of {namespace}: {}", reason(&error)))?;
    let belongs_to_account = |secret: &&Secret| {
        let account = secret.annotations().get("kubernetes.io/service-account.name");
        account.is_some_and(|account| account == name)
    };
    let secret = secrets.iter().find(belongs_to_account).with_context(|| {
        format!(
            "the account {namespace}/{name} has no token; create a Secret of type kubernetes.io/service-account-token for it, as \
             `tulle multicluster allow` does, or request a token by --token-duration"
        )
    })?;
    let token = secret.data.as_ref().and_then(|data| data.get("token"));
    let token = token.with_context(|| {
        format!(
            "Kubernetes has not written a token into Secret {namespace}/{} yet",
            secret.name_any()
        )
    })?;
    String::from_utf8(token.0.clone()).context("the token is not text")
}

/// Renders a kubeconfig. Its only credential is the token; it does not contain the credentials of the caller.
fn render_kubeconfig(args: &Args, access: &Config, token: &str) -> anyhow::Result<String> {
    let server = match &args.api_server_address {
        Some(address) => {
            let server: http::Uri = address
                .parse()
                .with_context(|| format!("--api-server-address {address:?}"))?;
            ensure!(
                server.scheme_str() == Some("https") && server.host().is_some(),
                "--api-server-address {address:?} is not a URL such as https://192.0.2.1:6443"
            );
            server
        }
        None => {
            ensure_reachable(&access.cluster_url)?;
            access.cluster_url.clone()
        }
    };
    let mut cluster = json!({"server": server.to_string().trim_end_matches('/')});
    if let Some(certificates) = &access.root_cert {
        let certificates = certificates.iter().map(|der| pem::Pem::new("CERTIFICATE", der.clone()));
        let bundle = pem::encode_many(&certificates.collect::<Vec<_>>());
        cluster["certificate-authority-data"] = json!(ByteString(bundle.into_bytes()));
    }
    if let Some(name) = &access.tls_server_name {
        cluster["tls-server-name"] = json!(name);
    }
    if access.accept_invalid_certs {
        cluster["insecure-skip-tls-verify"] = json!(true);
    }
    let (name, user) = (&args.cluster_name, &args.service_account_name);
    let kubeconfig = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": name,
        "contexts": [{"name": name, "context": {"cluster": name, "user": user}}],
        "clusters": [{"name": name, "cluster": cluster}],
        "users": [{"name": user, "user": {"token": token}}],
    });
    serde_yaml_ng::to_string(&kubeconfig).context("writing the kubeconfig")
}

/// Fails if the URL of the API server is reachable only from this machine.
fn ensure_reachable(server: &http::Uri) -> anyhow::Result<()> {
    let host = server.host().context("the URL of the API server has no host")?;
    let ip = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    let is_own = ip.is_ok_and(|ip| ip.is_loopback() || ip.is_unspecified());
    ensure!(
        !is_own && host != "localhost",
        "the other cluster cannot reach the API server at {server}; pass --api-server-address with a URL at which it can"
    );
    Ok(())
}

async fn gateway_service(args: &Args, cluster: &Cluster) -> anyhow::Result<Service> {
    let (namespace, name) = (&args.gateway_namespace, &args.gateway_name);
    let services: Api<Service> = Api::namespaced(cluster.client.clone(), namespace);
    let service = services.get_opt(name).await;
    let service = service.map_err(|error| anyhow!("reading Service {namespace}/{name}: {}", reason(&error)))?;
    service.with_context(|| {
        format!(
            "there is no gateway {namespace}/{name}; install it by `tulle multicluster install`, name another by --gateway-name and \
             --gateway-namespace, or link without one by --gateway=false"
        )
    })
}

fn gateway(args: &Args, service: &Service) -> anyhow::Result<Gateway> {
    let name = format!("the gateway {}/{}", args.gateway_namespace, args.gateway_name);
    let spec = service.spec.clone().unwrap_or_default();
    let is_node_port = spec.type_.as_deref() == Some("NodePort");
    let port = |wanted: &str| {
        let port = spec
            .ports
            .iter()
            .flatten()
            .find(|port| port.name.as_deref() == Some(wanted));
        let port = port.with_context(|| format!("{name} has no port named {wanted}"))?;
        let number = match is_node_port {
            true => port
                .node_port
                .with_context(|| format!("port {wanted} of {name} has no node port"))?,
            false => port.port,
        };
        u16::try_from(number).with_context(|| format!("port {wanted} of {name} is {number}"))
    };
    let required_annotation = |key: &str| {
        let value = service.annotations().get(key).filter(|value| !value.is_empty());
        value.with_context(|| format!("{name} has no annotation {key}"))
    };
    let period = required_annotation(annotation::PROBE_PERIOD)?;
    let is_number = period.bytes().all(|byte| byte.is_ascii_digit());
    Ok(Gateway {
        addresses: addresses(args, service).with_context(|| {
            format!(
                "{name} has no address yet (`kubectl get service -n {} {}` shows it); pass one by --gateway-addresses",
                args.gateway_namespace, args.gateway_name
            )
        })?,
        port: args
            .gateway_port
            .filter(|port| *port != 0)
            .map_or_else(|| port("mc-gateway"), Ok)?,
        identity: required_annotation(annotation::GATEWAY_IDENTITY)?.clone(),
        probe_path: required_annotation(annotation::PROBE_PATH)?.clone(),
        probe_port: port(multicluster::PROBE_PORT)?,
        probe_period: format!("{period}{}", if is_number { "s" } else { "" }),
    })
}

/// The addresses of the gateway, comma-separated. `None` if there is none.
fn addresses(args: &Args, service: &Service) -> Option<String> {
    let given: Vec<_> = comma_separated(&args.gateway_addresses).map(str::to_owned).collect();
    if !given.is_empty() {
        return Some(given.join(","));
    }
    let balancer = service.status.as_ref()?.load_balancer.as_ref()?;
    let ingress = balancer.ingress.iter().flatten();
    let found: Vec<_> = ingress
        .filter_map(|ingress| ingress.ip.clone().or_else(|| ingress.hostname.clone()))
        .collect();
    (!found.is_empty()).then(|| found.join(","))
}

fn comma_separated(list: &str) -> impl Iterator<Item = &str> {
    list.split(',').map(str::trim).filter(|entry| !entry.is_empty())
}

fn manifests(args: &Args, target: &Target, control_plane: &str) -> anyhow::Result<Vec<Value>> {
    let (name, secret) = (&args.cluster_name, secret_name(&args.cluster_name));
    let data = json!({"kubeconfig": ByteString(target.kubeconfig.clone().into_bytes())});
    let mut spec = json!({
        "targetClusterName": name,
        "targetClusterDomain": target.cluster_domain,
        "targetClusterLinkerdNamespace": control_plane,
        "clusterCredentialsSecret": secret,
        "remoteDiscoverySelector": parse_selector(&args.remote_discovery_selector)?,
        "federatedServiceSelector": parse_selector(&args.federated_service_selector)?,
        // As Linkerd's command writes it for a Link without a gateway.
        "probeSpec": {},
    });
    for (field, list) in [
        ("excludedAnnotations", &args.excluded_annotations),
        ("excludedLabels", &args.excluded_labels),
    ] {
        let entries: Vec<_> = comma_separated(list).collect();
        if !entries.is_empty() {
            spec[field] = json!(entries);
        }
    }
    if let Some(gateway) = &target.gateway {
        spec["gatewayAddress"] = json!(gateway.addresses);
        spec["gatewayPort"] = json!(gateway.port.to_string());
        spec["gatewayIdentity"] = json!(gateway.identity);
        spec["probeSpec"] = json!({
            "path": gateway.probe_path, "port": gateway.probe_port.to_string(), "period": gateway.probe_period,
        });
        // Otherwise they are the defaults of the definition of Link. Older definitions do not have these fields.
        if let Some(timeout) = args.probe_timeout {
            spec["probeSpec"]["timeout"] = json!(format_go_duration(timeout));
        }
        if let Some(threshold) = args.probe_failure_threshold {
            spec["probeSpec"]["failureThreshold"] = json!(threshold.to_string());
        }
        spec["selector"] = parse_selector(&args.selector)?;
    }
    let created_by = concat!("tulle/cli ", env!("CARGO_PKG_VERSION"));
    let mut manifests = vec![
        json!({
            "apiVersion": "v1", "kind": "Secret", "type": CREDENTIALS_SECRET_TYPE,
            "metadata": {"name": secret, "namespace": args.namespace},
            "data": data,
        }),
        json!({
            "apiVersion": "v1", "kind": "Secret", "type": CREDENTIALS_SECRET_TYPE,
            "metadata": {
                "name": secret, "namespace": control_plane,
                "labels": {label::CREDENTIALS_OF_CLUSTER: name},
                "annotations": {
                    annotation::TRUST_DOMAIN: target.trust_domain,
                    annotation::CLUSTER_DOMAIN: target.cluster_domain,
                },
            },
            "data": data,
        }),
    ];
    manifests.extend(credentials_permissions(name, &args.namespace, control_plane));
    // Last, because the service mirror uses the Secret as soon as the Link exists.
    manifests.push(json!({
        "apiVersion": "multicluster.linkerd.io/v1alpha3", "kind": "Link",
        "metadata": {
            "name": name, "namespace": args.namespace,
            "annotations": {annotation::CREATED_BY: created_by},
        },
        "spec": spec,
    }));
    Ok(manifests)
}

/// Formats a duration as Go does, which has no days.
fn format_go_duration(duration: Duration) -> String {
    match duration.subsec_millis() {
        0 => format!("{}s", duration.as_secs()),
        _ => format!("{}ms", duration.as_millis()),
    }
}

/// Converts a selector in the syntax of `kubectl -l` to a LabelSelector.
fn parse_selector(text: &str) -> anyhow::Result<Value> {
    let selector: Selector = text.parse().map_err(|error| anyhow!("{error}"))?;
    ensure!(
        !selector.is_empty(),
        "the selector is empty and selects no Service; expected labels such as app=web,tier!=test"
    );
    Ok(json!(LabelSelector::from(&selector)))
}

const DEFAULT_SELECTOR: &str = "mirror.linkerd.io/exported=true";
const MIN_TOKEN_DURATION: Duration = Duration::from_mins(10);
/// The chart has the same limit: it creates a Service `probe-<cluster name>`, and the name of a Service has at most 63 characters.
const MAX_CLUSTER_NAME_LEN: usize = 57;
/// With a longer name, Services whose names have 32 characters or more cannot be mirrored, and such names are common. The command
/// prints a warning.
const MAX_RECOMMENDED_CLUSTER_NAME_LEN: usize = 30;

pub(crate) const EXAMPLES: &str = "\
Run it against the cluster that exports Services, and apply its output in the one that uses them:

  tulle multicluster link-gen --context east --cluster-name east | kubectl --context west apply -f -

Each Service of east with the label mirror.linkerd.io/exported=true gets a mirror <name>-east in west, by the service mirror \
that `tulle multicluster install` prints.";

#[cfg(test)]
mod tests {
    use std::fs;

    use clap::Parser as _;
    use kube::config::{KubeConfigOptions, Kubeconfig};
    use tulle_control::trust;

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn args(line: &str) -> Args {
        let words = ["link-gen", "--cluster-name=east"]
            .into_iter()
            .chain(line.split_whitespace());
        Line::parse_from(words).args
    }

    fn service(spec: &Value, ingress: &Value) -> Service {
        let annotations = json!({
            "mirror.linkerd.io/gateway-identity": "gateway.east", "mirror.linkerd.io/probe-period": "3",
            "mirror.linkerd.io/probe-path": "/ready",
        });
        serde_json::from_value(json!({
            "metadata": {"name": "linkerd-gateway", "annotations": annotations},
            "spec": spec, "status": {"loadBalancer": {"ingress": ingress}},
        }))
        .unwrap()
    }

    fn ports() -> Value {
        json!({"type": "LoadBalancer", "ports": [
            {"name": "mc-gateway", "port": 4143, "nodePort": 30143}, {"name": "mc-probe", "port": 4191, "nodePort": 30191},
        ]})
    }

    #[test]
    fn a_gateway_has_the_address_and_ports_that_other_clusters_reach() {
        let balanced = service(&ports(), &json!([{"ip": "192.0.2.1"}, {"hostname": "east.example"}]));
        let found = gateway(&args(""), &balanced).unwrap();
        let expected = Gateway {
            addresses: "192.0.2.1,east.example".to_owned(),
            port: 4143,
            identity: "gateway.east".to_owned(),
            probe_path: "/ready".to_owned(),
            probe_port: 4191,
            probe_period: "3s".to_owned(),
        };
        assert_eq!(found, expected);
        let mut spec = ports();
        spec["type"] = json!("NodePort");
        let on_nodes = service(&spec, &json!([]));
        let error = gateway(&args(""), &on_nodes).unwrap_err().to_string();
        assert!(error.contains("--gateway-addresses"), "{error}");
        let found = gateway(&args("--gateway-addresses=192.0.2.7,,192.0.2.8"), &on_nodes).unwrap();
        assert_eq!(
            (&*found.addresses, found.port, found.probe_port),
            ("192.0.2.7,192.0.2.8", 30143, 30191)
        );
        let found = gateway(&args("--gateway-addresses=a --gateway-port=9"), &on_nodes).unwrap();
        assert_eq!(found.port, 9);
        let without = service(&json!({"ports": []}), &json!([{"ip": "192.0.2.1"}]));
        let error = gateway(&args(""), &without).unwrap_err().to_string();
        assert!(error.contains("no port named mc-gateway"), "{error}");
    }

    #[test]
    fn the_kubeconfig_has_the_token_and_no_credentials_of_the_caller() {
        let mut access = Config::new("https://192.0.2.1:6443".parse().unwrap());
        access.root_cert = Some(vec![vec![1; 100]]);
        access.auth_info.client_key_data = Some("the caller's key".to_owned().into());
        let text = render_kubeconfig(&args(""), &access, "the token").unwrap();
        let value: Value = serde_yaml_ng::from_str(&text).unwrap();
        assert_eq!(value["current-context"], "east");
        assert_eq!(value["clusters"][0]["cluster"]["server"], "https://192.0.2.1:6443");
        assert_eq!(value["users"][0]["user"], json!({"token": "the token"}));
        let bundle = value["clusters"][0]["cluster"]["certificate-authority-data"].clone();
        let bundle: ByteString = serde_json::from_value(bundle).unwrap();
        assert!(bundle.0.starts_with(b"-----BEGIN CERTIFICATE-----"), "{bundle:?}");
        let elsewhere = args("--api-server-address=https://east.example");
        let text = render_kubeconfig(&elsewhere, &access, "t").unwrap();
        assert!(text.contains("server: https://east.example\n"), "{text}");
        for server in [
            "https://127.0.0.1:6443",
            "https://localhost:6443",
            "https://[::1]:6443",
            "https://0.0.0.0",
        ] {
            access.cluster_url = server.parse().unwrap();
            let error = render_kubeconfig(&args(""), &access, "t").unwrap_err().to_string();
            assert!(error.contains("--api-server-address"), "{server}: {error}");
        }
    }

    #[test]
    fn the_manifests_are_two_secrets_with_their_permissions_and_a_link() {
        let target = Target {
            cluster_domain: "east.test".to_owned(),
            trust_domain: "trust.test".to_owned(),
            kubeconfig: "k".to_owned(),
            gateway: None,
        };
        let args = args("--gateway=false --excluded-labels=a,b/*");
        let [mirror, discovery, permissions @ .., link] = &manifests(&args, &target, "linkerd").unwrap()[..] else {
            panic!("at least three objects")
        };
        let kinds: Vec<_> = permissions.iter().map(|object| &object["kind"]).collect();
        assert_eq!(kinds, ["Role", "RoleBinding", "Role", "RoleBinding"]);
        for (secret, namespace) in [(mirror, "linkerd-multicluster"), (discovery, "linkerd")] {
            assert_eq!(secret["type"], "mirror.linkerd.io/remote-kubeconfig");
            assert_eq!(secret["metadata"]["namespace"], namespace);
            assert_eq!(secret["data"]["kubeconfig"], "aw==");
        }
        assert_eq!(
            discovery["metadata"]["labels"]["multicluster.linkerd.io/cluster-name"],
            "east"
        );
        let annotations = &discovery["metadata"]["annotations"];
        assert_eq!(annotations["multicluster.linkerd.io/trust-domain"], "trust.test");
        assert_eq!(link["spec"]["excludedLabels"], json!(["a", "b/*"]));
        assert_eq!(link["spec"]["probeSpec"], json!({}));
        for field in [
            "gatewayAddress",
            "gatewayPort",
            "gatewayIdentity",
            "selector",
            "excludedAnnotations",
        ] {
            assert!(link["spec"].get(field).is_none(), "{field}");
        }
    }

    /// Prints the manifests of a cluster with a gateway, and returns its kubeconfig, too.
    fn print_link(line: &str) -> (Vec<Value>, String) {
        let (args, access) = (args(line), Config::new("https://192.0.2.1:6443".parse().unwrap()));
        let balanced = service(&ports(), &json!([{"ip": "192.0.2.7"}]));
        let target = Target {
            cluster_domain: "east.test".to_owned(),
            trust_domain: "trust.test".to_owned(),
            kubeconfig: render_kubeconfig(&args, &access, "the token").unwrap(),
            gateway: Some(gateway(&args, &balanced).unwrap()),
        };
        (manifests(&args, &target, "linkerd").unwrap(), target.kubeconfig)
    }

    #[test]
    fn the_manifests_of_a_cluster_with_a_gateway_are_these() {
        let (printed, kubeconfig) = print_link("");
        let secret = |metadata: Value| {
            json!({
                "apiVersion": "v1", "kind": "Secret", "type": "mirror.linkerd.io/remote-kubeconfig",
                "metadata": metadata, "data": {"kubeconfig": ByteString(kubeconfig.clone().into_bytes())},
            })
        };
        let for_mirror = json!({"name": "cluster-credentials-east", "namespace": "linkerd-multicluster"});
        let for_destination = json!({
            "name": "cluster-credentials-east", "namespace": "linkerd",
            "labels": {"multicluster.linkerd.io/cluster-name": "east"},
            "annotations": {
                "multicluster.linkerd.io/trust-domain": "trust.test",
                "multicluster.linkerd.io/cluster-domain": "east.test",
            },
        });
        let link = json!({
            "apiVersion": "multicluster.linkerd.io/v1alpha3", "kind": "Link",
            "metadata": {
                "name": "east", "namespace": "linkerd-multicluster",
                "annotations": {"linkerd.io/created-by": format!("tulle/cli {}", env!("CARGO_PKG_VERSION"))},
            },
            "spec": {
                "targetClusterName": "east", "targetClusterDomain": "east.test",
                "targetClusterLinkerdNamespace": "linkerd", "clusterCredentialsSecret": "cluster-credentials-east",
                "gatewayAddress": "192.0.2.7", "gatewayPort": "4143", "gatewayIdentity": "gateway.east",
                // The timeout and the threshold are defaults of the definition.
                "probeSpec": {"path": "/ready", "port": "4191", "period": "3s"},
                "selector": {"matchLabels": {"mirror.linkerd.io/exported": "true"}},
                "remoteDiscoverySelector": {"matchLabels": {"mirror.linkerd.io/exported": "remote-discovery"}},
                "federatedServiceSelector": {"matchLabels": {"mirror.linkerd.io/federated": "member"}},
            },
        });
        let mut expected = vec![secret(for_mirror), secret(for_destination)];
        expected.extend(credentials_permissions("east", "linkerd-multicluster", "linkerd"));
        expected.push(link);
        assert_eq!(printed, expected);
        let account = "linkerd-service-mirror-remote-access-default";
        let kubeconfig: Value = serde_yaml_ng::from_str(&kubeconfig).unwrap();
        let expected = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "east",
            "contexts": [{"name": "east", "context": {"cluster": "east", "user": account}}],
            "clusters": [{"name": "east", "cluster": {"server": "https://192.0.2.1:6443"}}],
            "users": [{"name": account, "user": {"token": "the token"}}],
        });
        assert_eq!(kubeconfig, expected);
        // The same input has the same output, byte by byte.
        let texts = [printed, print_link("").0].map(|printed| format_manifests(&printed, Output::Yaml).unwrap());
        assert_eq!(texts[0], texts[1]);
    }

    #[test]
    fn the_timeout_and_the_threshold_of_probes_are_those_of_the_flags() {
        for (line, expected) in [
            ("--probe-timeout=1500ms", ("1500ms", Value::Null)),
            ("--probe-timeout=2m --probe-failure-threshold=1", ("120s", json!("1"))),
        ] {
            let (printed, _) = print_link(line);
            let probe = &printed.last().unwrap()["spec"]["probeSpec"];
            let found = (probe["timeout"].as_str().unwrap(), probe["failureThreshold"].clone());
            assert_eq!(found, expected, "{line}");
        }
        for (flag, expected) in [
            ("--probe-timeout=0", "invalid value '0' for '--probe-timeout"),
            ("--probe-timeout=1x", "\"1x\" is not a duration"),
            ("--probe-failure-threshold=0", "0 is not in 1.."),
            (
                "--token-duration=5m",
                "'5m' for '--token-duration <DURATION>': Kubernetes creates no token for less than 10m",
            ),
            ("--token-duration=soon", "\"soon\" is not a duration"),
        ] {
            let line = Line::try_parse_from(["link-gen", "--cluster-name=east", flag]);
            let error = line.err().expect("the flag is refused").to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[tokio::test]
    async fn a_certificate_authority_in_a_file_becomes_part_of_the_kubeconfig() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("authority.crt");
        let anchor = trust::create_anchor("authority.test", Duration::from_secs(86_400)).unwrap();
        fs::write(&path, &anchor.certificate).unwrap();
        let of_caller = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
             contexts: [{{name: c, context: {{cluster: c, user: u}}}}]\n\
             clusters: [{{name: c, cluster: {{server: 'https://192.0.2.1:6443', certificate-authority: '{}'}}}}]\n\
             users: [{{name: u, user: {{token: t}}}}]\n",
            path.display()
        );
        let of_caller = Kubeconfig::from_yaml(&of_caller).unwrap();
        let access = Config::from_custom_kubeconfig(of_caller, &KubeConfigOptions::default()).await;
        let text = render_kubeconfig(&args(""), &access.unwrap(), "t").unwrap();
        assert!(!text.contains("authority.crt"), "{text}");
        let kubeconfig: Value = serde_yaml_ng::from_str(&text).unwrap();
        let bundle = kubeconfig["clusters"][0]["cluster"]["certificate-authority-data"].clone();
        let bundle: ByteString = serde_json::from_value(bundle).unwrap();
        let certificates = [bundle.0, anchor.certificate.into_bytes()].map(|text| pem::parse(text).unwrap());
        assert_eq!(certificates[0].contents(), certificates[1].contents());
    }

    #[test]
    fn invalid_flags_are_refused_with_their_name() {
        for (line, expected) in [
            ("--cluster-name=East", "--cluster-name \"East\""),
            ("--gateway=false --gateway-port=1", "--gateway-port has no effect"),
            (
                "--gateway=false --gateway-addresses=a",
                "--gateway-addresses has no effect",
            ),
            ("--gateway=false --selector=app=web", "--selector has no effect"),
            (
                "--gateway=false --probe-timeout=5s",
                "--probe-timeout has no effect with --gateway=false",
            ),
            (
                "--gateway=false --probe-failure-threshold=1",
                "--probe-failure-threshold has no effect",
            ),
            ("--selector=", "--selector"),
        ] {
            let line = Line::try_parse_from(
                ["link-gen"]
                    .into_iter()
                    .chain(line.split(' '))
                    .chain((!line.contains("--cluster-name")).then_some("--cluster-name=east")),
            );
            let error = format!("{:#}", check_args(&line.unwrap().args).unwrap_err());
            assert!(error.contains(expected), "{error}");
        }
    }
}
