//! `tulle profile`: creates ServiceProfiles, from a template or from an API description of the service.
//!
//! It only prints the profile, for use with `kubectl apply`.

mod model;
mod open_api;
mod proto;

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, bail, ensure};
use clap::ValueEnum;
use tulle_core::dns_names::is_dns_label;

use self::model::{Metadata, Profile, Spec};
use crate::kubernetes;
use crate::{config, runtime};

#[derive(clap::Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
#[command(group = clap::ArgGroup::new("source").required(true).args(["template", "open_api", "proto"]))]
pub(crate) struct Args {
    /// Create a template to edit
    #[arg(long)]
    template: bool,
    /// Create a profile from an OpenAPI 2 or 3 description in YAML or JSON; - reads standard input
    #[arg(long, value_name = "FILE")]
    open_api: Option<PathBuf>,
    /// Create a profile from the services of a .proto file; - reads standard input
    #[arg(long, value_name = "FILE")]
    proto: Option<PathBuf>,
    /// The service that the profile describes
    #[arg(value_name = "SERVICE")]
    service: String,
    /// The namespace of the service
    #[arg(short, long, value_name = "NAMESPACE", default_value = "default")]
    namespace: String,
    /// Use cluster.local as the cluster's domain, without querying the control plane
    #[arg(long)]
    ignore_cluster: bool,
    /// Output format
    #[arg(short, long, value_enum, default_value_t = Output::Yaml)]
    output: Output,
}

#[derive(ValueEnum, Clone, Copy, Debug, Eq, PartialEq)]
enum Output {
    Yaml,
    Json,
}

pub(crate) fn main(args: &Args, flags: &kubernetes::Flags) -> anyhow::Result<ExitCode> {
    for (kind, name) in [("service", &args.service), ("namespace", &args.namespace)] {
        ensure!(
            is_dns_label(name),
            "{name:?} is not a valid {kind} name; expected at most 63 lower-case letters, digits and '-', with no '-' at the \
             start or end, such as web"
        );
    }
    let domain = match args.ignore_cluster {
        true => DEFAULT_CLUSTER_DOMAIN.to_owned(),
        false => runtime()?.block_on(cluster_domain(flags))?,
    };
    let name = format!("{}.{}.svc.{domain}", args.service, args.namespace);
    let routes = match (&args.open_api, &args.proto) {
        (Some(path), _) => {
            open_api::routes(&read_input(path)?).with_context(|| format!("reading OpenAPI from {path:?}"))?
        }
        (_, Some(path)) => {
            proto::routes(&read_input(path)?).with_context(|| format!("reading protobuf from {path:?}"))?
        }
        (None, None) if args.template => {
            ensure!(
                args.output == Output::Yaml,
                "a template has comments, which JSON does not support; remove -o json"
            );
            crate::print(&template(&name, &args.namespace))?;
            return Ok(ExitCode::SUCCESS);
        }
        (None, None) => bail!("one of --template, --open-api and --proto is required"),
    };
    let profile = Profile {
        api_version: "linkerd.io/v1alpha2",
        kind: "ServiceProfile",
        metadata: Metadata {
            name,
            namespace: args.namespace.clone(),
        },
        spec: Spec { routes },
    };
    crate::print(&format_profile(&profile, args.output)?)?;
    Ok(ExitCode::SUCCESS)
}

fn format_profile(profile: &Profile, output: Output) -> anyhow::Result<String> {
    Ok(match output {
        Output::Yaml => serde_yaml_ng::to_string(profile).context("writing YAML")?,
        Output::Json => serde_json::to_string_pretty(profile).context("writing JSON")? + "\n",
    })
}

async fn cluster_domain(flags: &kubernetes::Flags) -> anyhow::Result<String> {
    let values = async { config::values(&flags.connect().await?).await };
    let values = values
        .await
        .context("reading the cluster's domain from the control plane; to use cluster.local, pass --ignore-cluster")?;
    Ok(values["clusterDomain"]
        .as_str()
        .filter(|domain| !domain.is_empty())
        .unwrap_or(DEFAULT_CLUSTER_DOMAIN)
        .to_owned())
}

fn read_input(path: &Path) -> anyhow::Result<String> {
    if path == Path::new("-") {
        let mut text = String::new();
        std::io::stdin()
            .read_to_string(&mut text)
            .context("reading standard input")?;
        return Ok(text);
    }
    std::fs::read_to_string(path).with_context(|| format!("reading {path:?}"))
}

fn template(name: &str, namespace: &str) -> String {
    let (service, domain) = name.split_once('.').unwrap_or((name, namespace));
    format!(
        r#"apiVersion: linkerd.io/v1alpha2
kind: ServiceProfile
metadata:
  # The DNS name of the service.
  name: {name}
  namespace: {namespace}
spec:
  # A request belongs to the first route whose condition matches.
  routes:
  - # The label `rt_route` of metrics.
    name: GET /authors/{{id}}
    # A regular expression for the whole path, a method, or conditions combined with all, any and not.
    condition:
      method: GET
      pathRegex: /authors/[^/]*
    # Whether failed requests may be sent again, within the budget below.
    isRetryable: true
    # How long a request and its retries may take.
    timeout: 300ms
    # Which responses are failures. Without classes: responses with a status of 500 or more.
    responseClasses:
    - condition:
        status:
          min: 500
          max: 599
      isFailure: true

  # The limit for retries: a ratio of the requests, plus a fixed number per second.
  retryBudget:
    retryRatio: 0.2
    minRetriesPerSecond: 10
    ttl: 10s

  # To split the traffic, list services and their weights:
  # dstOverrides:
  # - authority: {service}-v2.{domain}
  #   weight: 100m
  # - authority: {name}
  #   weight: 900m
"#
    )
}

const DEFAULT_CLUSTER_DOMAIN: &str = "cluster.local";

const EXAMPLES: &str = "\
  tulle profile --template web -n shop > web.yaml
  tulle profile --open-api web.swagger.json web -n shop | kubectl apply -f -
  tulle profile --proto web.proto web -n shop --ignore-cluster

In OpenAPI, `x-linkerd-retryable: true` and `x-linkerd-timeout: 300ms` of an operation set retries and timeout of its route.
In protobuf, `option idempotency_level = NO_SIDE_EFFECTS` or `IDEMPOTENT` makes a method retryable.";

#[cfg(test)]
mod tests {
    use serde::de::IntoDeserializer as _;
    use tulle_control::resources::{self, Kind};

    use super::model::{Condition, ResponseClass, ResponseCondition, Route, StatusRange};
    use super::*;

    /// Parses a profile with the control plane's code.
    fn decode(yaml: &str) -> resources::Object {
        let value: serde_json::Value = serde_yaml_ng::from_str(yaml).unwrap();
        resources::decode(Kind::ServiceProfile, value.into_deserializer()).unwrap_or_else(|err| panic!("{err}: {yaml}"))
    }

    #[test]
    fn the_template_is_a_valid_profile_also_with_its_commented_out_overrides() {
        let other = template("api.shop.svc.example.com", "shop");
        assert!(other.contains("authority: api-v2.shop.svc.example.com\n"), "{other}");
        let template = template("web.shop.svc.cluster.local", "shop");
        let object = decode(&template);
        assert_eq!(&*object.meta().name.name, "web.shop.svc.cluster.local");
        let all: Vec<_> = template
            .lines()
            .map(|line| match line.strip_prefix("  # ") {
                Some(more) if more.starts_with("dstOverrides") || more.starts_with("- ") || more.starts_with("  ") => {
                    format!("  {more}")
                }
                _ => line.to_owned(),
            })
            .collect();
        let resources::Object::ServiceProfile(profile) = decode(&all.join("\n")) else {
            panic!("not a profile");
        };
        assert_eq!(profile.overrides.len(), 2);
    }

    #[test]
    fn the_control_plane_can_parse_each_output_format() {
        let profile = Profile {
            api_version: "linkerd.io/v1alpha2",
            kind: "ServiceProfile",
            metadata: Metadata {
                name: "web.shop.svc.cluster.local".to_owned(),
                namespace: "shop".to_owned(),
            },
            spec: Spec {
                routes: vec![Route {
                    name: "GET /".to_owned(),
                    condition: Condition {
                        method: "GET".to_owned(),
                        path_regex: "/".to_owned(),
                    },
                    response_classes: vec![ResponseClass {
                        condition: ResponseCondition {
                            status: StatusRange { min: 500, max: 500 },
                        },
                        is_failure: true,
                    }],
                    is_retryable: true,
                    timeout: Some("300ms".to_owned()),
                }],
            },
        };
        for output in [Output::Yaml, Output::Json] {
            decode(&format_profile(&profile, output).unwrap());
        }
    }
}
