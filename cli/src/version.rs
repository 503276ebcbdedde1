//! `tulle version`: the versions of this command, of the control plane and of proxies.

use std::collections::BTreeMap;
use std::process::ExitCode;

use anyhow::anyhow;
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, ResourceExt as _};
use tulle_core::names::{annotation, label};

use crate::kubernetes::{self, reason};
use crate::{config, runtime};

#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Args {
    /// Print only the version numbers
    #[arg(long)]
    short: bool,
    /// Show only the version of this command, without querying a cluster
    #[arg(long, conflicts_with = "proxy")]
    client: bool,
    /// Show the versions of running proxies, and the number of each
    #[arg(long)]
    proxy: bool,
    /// The namespace of the proxies (with --proxy) [default: all]
    #[arg(short, long, value_name = "NAMESPACE", requires = "proxy")]
    namespace: Option<String>,
}

/// Prints the versions. If the configuration of the control plane cannot be read, the server version is `unavailable`, and the
/// exit code is 1.
///
/// # Errors
/// Fails with `--proxy` if the pods cannot be listed.
pub(crate) fn main(args: &Args, flags: &kubernetes::Flags) -> anyhow::Result<ExitCode> {
    let title = |text: &'static str| if args.short { "" } else { text };
    println!("{}{CLI_VERSION}", title("Client version: "));
    if args.client {
        return Ok(ExitCode::SUCCESS);
    }
    runtime()?.block_on(async {
        let values = async { config::values(&flags.connect().await?).await };
        let server = values.await;
        let version = server
            .as_ref()
            .ok()
            .and_then(|values| values["linkerdVersion"].as_str());
        println!("{}{}", title("Server version: "), version.unwrap_or("unavailable"));
        if let Err(error) = &server {
            eprintln!("tulle: {error:#}");
        }
        if args.proxy {
            print_proxies(args, flags).await?;
        }
        Ok(if server.is_ok() {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        })
    })
}

async fn print_proxies(args: &Args, flags: &kubernetes::Flags) -> anyhow::Result<()> {
    let cluster = flags.connect().await?;
    let api: Api<Pod> = match &args.namespace {
        Some(namespace) => Api::namespaced(cluster.client.clone(), namespace),
        None => Api::all(cluster.client.clone()),
    };
    let selector = format!("linkerd.io/control-plane-ns={}", cluster.control_plane_namespace);
    let pods = cluster.list(&api, &ListParams::default().labels(&selector)).await;
    let pods = pods.map_err(|error| anyhow!("listing the pods with {selector}: {}", reason(&error)))?;
    let versions = proxy_versions(&pods);
    if !args.short {
        println!("Proxy versions:");
    }
    for (version, count) in &versions {
        match args.short {
            true => println!("{version}"),
            false => println!("  {version} ({count} pods)"),
        }
    }
    Ok(())
}

fn proxy_versions(pods: &[Pod]) -> BTreeMap<&str, usize> {
    let mut versions = BTreeMap::new();
    for pod in pods {
        // Pods of a control plane are not counted, although those of Linkerd's control plane have proxies.
        if let Some(version) = pod.annotations().get(annotation::PROXY_VERSION)
            && !pod.labels().contains_key(label::CONTROL_PLANE_COMPONENT)
        {
            *versions.entry(version.as_str()).or_default() += 1;
        }
    }
    versions
}

pub(crate) const CLI_VERSION: &str = env!("CARGO_PKG_VERSION");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proxies_are_counted_by_version() {
        let pod = |version: &str, component: Option<&str>| {
            let mut pod = Pod::default();
            pod.annotations_mut()
                .insert(annotation::PROXY_VERSION.to_owned(), version.to_owned());
            if let Some(component) = component {
                pod.labels_mut()
                    .insert(label::CONTROL_PLANE_COMPONENT.to_owned(), component.to_owned());
            }
            pod
        };
        let pods = [
            pod("1", None),
            pod("2", None),
            pod("1", None),
            pod("9", Some("identity")),
        ];
        assert_eq!(proxy_versions(&pods), BTreeMap::from([("1", 2), ("2", 1)]));
    }
}
