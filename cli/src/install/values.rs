//! Converts flags to values of the charts.

use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;

use anyhow::Context as _;
use serde_json::{Map, Value, json};

use super::charts::{CONTROL_PLANE, Helm};

/// Defines the flags that set one value each, and the path of each value.
macro_rules! value_flags {
    ($($(#[doc = $doc:literal])* $flag:ident: $kind:ty => $pointer:literal;)*) => {
        /// Flags that set one value of a chart each.
        #[derive(clap::Args, Clone, Debug, Default)]
        #[command(next_help_heading = "Values of the charts")]
        struct SingleValueFlags {
            $($(#[doc = $doc])* #[arg(long, value_name = "VALUE")] $flag: Option<$kind>,)*
        }

        impl SingleValueFlags {
            fn apply_to(&self, values: &mut Value) {
                $(if let Some(value) = &self.$flag { set_value(values, $pointer, json!(value)); })*
            }
        }
    };
}

value_flags! {
    /// Replicas of each component
    controller_replicas: u32 => "controllerReplicas";
    /// The log level of the control plane: error, warn, info, debug, trace
    controller_log_level: String => "controllerLogLevel";
    /// The user that the control plane runs as
    controller_uid: i64 => "controllerUID";
    /// The group that the control plane runs as
    controller_gid: i64 => "controllerGID";
    /// The cluster's DNS domain
    cluster_domain: String => "clusterDomain";
    /// The networks of pods and services, comma-separated
    cluster_networks: String => "clusterNetworks";
    /// The trust domain of identities
    identity_trust_domain: String => "identityTrustDomain";
    /// The lifetime of proxy certificates, such as 24h
    identity_issuance_lifetime: String => "identity.issuer.issuanceLifetime";
    /// The allowed clock difference between machines, such as 20s
    identity_clock_skew_allowance: String => "identity.issuer.clockSkewAllowance";
    /// When images are pulled: Always, IfNotPresent, Never
    image_pull_policy: String => "imagePullPolicy";
    /// The default inbound policy of ports without a Server
    default_inbound_policy: String => "proxy.defaultInboundPolicy";
    /// The image of the proxy
    proxy_image: String => "proxy.image.name";
    /// The tag of the proxy's image
    proxy_version: String => "proxy.image.version";
    /// The log level of proxies
    proxy_log_level: String => "proxy.logLevel";
    /// The user that proxies run as
    proxy_uid: i64 => "proxy.uid";
    /// The group that proxies run as
    proxy_gid: i64 => "proxy.gid";
    /// The CPU request of a proxy
    proxy_cpu_request: String => "proxy.resources.cpu.request";
    /// The CPU limit of a proxy
    proxy_cpu_limit: String => "proxy.resources.cpu.limit";
    /// The memory request of a proxy
    proxy_memory_request: String => "proxy.resources.memory.request";
    /// The memory limit of a proxy
    proxy_memory_limit: String => "proxy.resources.memory.limit";
    /// Inbound ports and port ranges that bypass the proxy
    skip_inbound_ports: String => "proxyInit.ignoreInboundPorts";
    /// Outbound ports and port ranges that bypass the proxy
    skip_outbound_ports: String => "proxyInit.ignoreOutboundPorts";
}

#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = "Values of the charts")]
pub(super) struct Flags {
    /// Run three replicas of each component, spread over nodes and zones, with resource requests
    #[arg(long)]
    ha: bool,
    /// The trust anchors, a PEM bundle
    #[arg(long, value_name = "FILE")]
    identity_trust_anchors_file: Option<PathBuf>,
    /// The issuer's certificate and its chain up to the trust anchor, in PEM format
    #[arg(long, value_name = "FILE", requires = "identity_issuer_key_file")]
    identity_issuer_certificate_file: Option<PathBuf>,
    /// The issuer's private key, in PEM format
    #[arg(long, value_name = "FILE", requires = "identity_issuer_certificate_file")]
    identity_issuer_key_file: Option<PathBuf>,
    /// Use an existing issuer Secret of type kubernetes.io/tls
    #[arg(long, conflicts_with = "identity_issuer_certificate_file")]
    identity_external_issuer: bool,
    /// Use an existing ConfigMap of trust anchors
    #[arg(long, conflicts_with = "identity_trust_anchors_file")]
    identity_external_ca: bool,
    /// The registry of the images, such as registry.example.com/mesh
    #[arg(long, value_name = "REGISTRY")]
    registry: Option<String>,
    /// Let the CNI plugin set up the redirect rules of pods
    #[arg(long)]
    linkerd_cni_enabled: bool,
    /// Read endpoints from EndpointSlices [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    enable_endpoint_slices: Option<bool>,
    /// Keep HTTP/1 between proxies instead of upgrading it to HTTP/2
    #[arg(long)]
    disable_h2_upgrade: bool,
    /// Accepted for compatibility; no heartbeat is ever sent
    #[arg(long)]
    disable_heartbeat: bool,
    /// Also query profiles for names outside the cluster
    #[arg(long)]
    enable_external_profiles: bool,
    #[command(flatten)]
    single_values: SingleValueFlags,
    #[command(flatten)]
    helm: HelmFlags,
}

/// The flags that set values as in Helm.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = "Values of the charts")]
pub(crate) struct HelmFlags {
    /// Read values from a file, as Helm does; may be repeated
    #[arg(short = 'f', long = "values", value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Set a value, as Helm does, such as proxy.logLevel=debug; may be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Set a value that is always a string, such as podLabels.release=1
    #[arg(long, value_name = "KEY=VALUE")]
    set_string: Vec<String>,
    /// Set a value to the content of a file, such as identityTrustAnchorsPEM=ca.crt
    #[arg(long, value_name = "KEY=FILE")]
    set_file: Vec<String>,
}

/// Merges the values of the last installation, of `--ha`, of files, of flags, and of `--set`. In this order, later values override
/// earlier values.
///
/// # Errors
/// Fails if a file cannot be read, or if Helm fails.
pub(super) fn merge(helm: &Helm, flags: &Flags, previous: Option<&Value>) -> anyhow::Result<Value> {
    let mut files = Vec::new();
    if let Some(previous) = previous {
        files.push(write_values(helm, "previous-values.yaml", previous)?);
    }
    if flags.ha {
        files.push(helm.high_availability_values(&CONTROL_PLANE));
    }
    merge_values(helm, files, &flags.helm, &flags.values()?)
}

/// Merges the values of `files`, of `--values`, of flags (`flag_values`), and of `--set`. In this order, later values override
/// earlier values.
///
/// # Errors
/// Fails if a file cannot be read, or if Helm fails.
pub(crate) fn merge_values(
    helm: &Helm,
    files: impl IntoIterator<Item = PathBuf>,
    flags: &HelmFlags,
    flag_values: &Value,
) -> anyhow::Result<Value> {
    let flag_values = write_values(helm, "values-of-flags.yaml", flag_values)?;
    let files = files.into_iter().chain(flags.files.iter().cloned());
    let files = files.chain([flag_values]);
    let mut args: Vec<OsString> = files
        .flat_map(|file| ["--values".into(), file.into_os_string()])
        .collect();
    for (flag, assignments) in [
        ("--set", &flags.set),
        ("--set-string", &flags.set_string),
        ("--set-file", &flags.set_file),
    ] {
        for assignment in assignments {
            args.extend([flag.into(), assignment.into()]);
        }
    }
    helm.merge(&args)
}

/// Writes values to a file in the directory of the charts.
pub(crate) fn write_values(helm: &Helm, name: &str, values: &Value) -> anyhow::Result<PathBuf> {
    let path = helm.path_beside_charts(name);
    let text = serde_yaml_ng::to_string(values).context("writing values")?;
    fs::write(&path, text).with_context(|| format!("writing {path:?}"))?;
    Ok(path)
}

impl Flags {
    /// The values that these flags set.
    fn values(&self) -> anyhow::Result<Value> {
        let mut values = Value::Object(Map::new());
        let file = |path: &PathBuf| fs::read_to_string(path).with_context(|| format!("reading {path:?}"));
        for (path, key) in [
            (&self.identity_trust_anchors_file, "identityTrustAnchorsPEM"),
            (&self.identity_issuer_certificate_file, "identity.issuer.tls.crtPEM"),
            (&self.identity_issuer_key_file, "identity.issuer.tls.keyPEM"),
        ] {
            if let Some(path) = path {
                set_value(&mut values, key, json!(file(path)?));
            }
        }
        for (given, key, value) in [
            (
                self.identity_external_issuer,
                "identity.issuer.scheme",
                json!("kubernetes.io/tls"),
            ),
            (self.identity_external_ca, "identity.externalCA", json!(true)),
            (self.linkerd_cni_enabled, "cniEnabled", json!(true)),
            (self.disable_h2_upgrade, "enableH2Upgrade", json!(false)),
            (self.disable_heartbeat, "disableHeartBeat", json!(true)),
            (
                self.enable_external_profiles,
                "proxy.enableExternalProfiles",
                json!(true),
            ),
        ] {
            if given {
                set_value(&mut values, key, value);
            }
        }
        if let Some(enabled) = self.enable_endpoint_slices {
            set_value(&mut values, "enableEndpointSlices", json!(enabled));
        }
        if let Some(registry) = &self.registry {
            let registry = registry.trim_end_matches('/');
            set_value(&mut values, "controllerImage", json!(format!("{registry}/controller")));
            set_value(&mut values, "proxy.image.name", json!(format!("{registry}/proxy")));
        }
        self.single_values.apply_to(&mut values);
        Ok(values)
    }
}

/// Sets a value by its dotted path.
pub(crate) fn set_value(values: &mut Value, path: &str, value: Value) {
    let place = path.split('.').fold(values, |values, key| &mut values[key]);
    *place = value;
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        flags: Flags,
    }

    fn values(line: &str) -> Value {
        let words = std::iter::once("tulle").chain(line.split_whitespace());
        Line::try_parse_from(words)
            .unwrap_or_else(|err| panic!("{err}"))
            .flags
            .values()
            .unwrap()
    }

    #[test]
    fn each_flag_sets_a_value() {
        assert_eq!(values(""), json!({}));
        assert_eq!(
            values("--controller-replicas 3 --proxy-cpu-request 100m --proxy-cpu-limit 1 --disable-h2-upgrade"),
            json!({
                "controllerReplicas": 3,
                "enableH2Upgrade": false,
                "proxy": { "resources": { "cpu": { "request": "100m", "limit": "1" } } },
            })
        );
        assert_eq!(
            values("--registry r.example/mesh/ --proxy-image mine --enable-endpoint-slices=false"),
            json!({
                "controllerImage": "r.example/mesh/controller",
                "proxy": { "image": { "name": "mine" } },
                "enableEndpointSlices": false,
            })
        );
        assert_eq!(
            values("--identity-external-issuer --identity-external-ca --identity-trust-domain t.example"),
            json!({
                "identity": { "externalCA": true, "issuer": { "scheme": "kubernetes.io/tls" } },
                "identityTrustDomain": "t.example",
            })
        );
    }

    #[test]
    fn files_are_read_into_values() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ca.crt");
        fs::write(&path, "PEM").unwrap();
        assert_eq!(
            values(&format!("--identity-trust-anchors-file {}", path.display())),
            json!({ "identityTrustAnchorsPEM": "PEM" })
        );
        let words = ["tulle", "--identity-issuer-certificate-file", "crt.pem"];
        assert!(Line::try_parse_from(words).is_err());
    }
}
