//! `tulle metrics`, `tulle diagnostics proxy-metrics` and `controller-metrics`: the metrics pages of pods.

mod obfuscate;

use std::fmt::Write as _;
use std::process::ExitCode;

use k8s_openapi::api::core::v1::{Container, Pod};
use kube::ResourceExt as _;
use tulle_core::names::label;

use self::obfuscate::Obfuscation;
use crate::kubernetes::resource::{self, Kind, ResourceRef};
use crate::kubernetes::{self, Cluster, forward};
use crate::runtime;

#[derive(clap::Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ProxyMetricsArgs {
    /// A workload, or all of a type: deploy/web, pod/web-1, deploy
    #[arg(value_name = "TYPE/NAME", required = true, num_args = 1..=2)]
    resource: Vec<String>,
    /// The namespace of the workload [default: the namespace of the kubeconfig's context]
    #[arg(short, long, value_name = "NAMESPACE")]
    namespace: Option<String>,
    /// Replace names of workloads, hosts and routes, so that the output can be shared
    #[arg(long)]
    obfuscate: bool,
}

/// Runs `tulle metrics` and `tulle diagnostics proxy-metrics`.
pub(crate) fn print_proxy_metrics(args: &ProxyMetricsArgs, flags: &kubernetes::Flags) -> anyhow::Result<ExitCode> {
    let resource = ResourceRef::parse(&args.resource)?;
    runtime()?.block_on(async {
        let cluster = flags.connect().await?;
        let namespace = args.namespace.as_deref().unwrap_or(&cluster.namespace);
        let pods = resource.pods(&cluster, namespace).await?;
        let obfuscation = args.obfuscate.then(Obfuscation::new);
        let pages = pods.iter().filter_map(|pod| {
            let proxy = containers(pod).find(|container| container.name == "linkerd-proxy")?;
            Some(MetricsPage {
                pod,
                container: None,
                port: resource::admin_port(proxy),
            })
        });
        let pages: Vec<_> = pages.collect();
        anyhow::ensure!(
            !pages.is_empty(),
            "{} of namespace {namespace} has no pod with a proxy",
            args.resource.join(" ")
        );
        print_pages(&cluster, &pages, obfuscation.as_ref()).await
    })
}

/// Runs `tulle diagnostics controller-metrics`.
pub(crate) fn print_controller_metrics(flags: &kubernetes::Flags) -> anyhow::Result<ExitCode> {
    runtime()?.block_on(async {
        let cluster = flags.connect().await?;
        let all = ResourceRef {
            kind: Kind::Pod,
            name: None,
        };
        let mut pods = all.pods(&cluster, &cluster.control_plane_namespace).await?;
        pods.retain(|pod| pod.labels().contains_key(label::CONTROL_PLANE_COMPONENT));
        let pages = pods.iter().flat_map(|pod| {
            containers(pod).flat_map(move |container| {
                let admin = resource::ports(container).filter(|(name, _)| name.ends_with("-admin"));
                admin.map(move |(_, port)| MetricsPage {
                    pod,
                    container: Some(&container.name),
                    port,
                })
            })
        });
        let pages: Vec<_> = pages.collect();
        anyhow::ensure!(
            !pages.is_empty(),
            "namespace {} has no pod of a control plane; use -L for another namespace",
            cluster.control_plane_namespace
        );
        print_pages(&cluster, &pages, None).await
    })
}

struct MetricsPage<'a> {
    pod: &'a Pod,
    container: Option<&'a str>,
    port: u16,
}

impl MetricsPage<'_> {
    fn heading(&self, position: &str, obfuscation: Option<&Obfuscation>) -> String {
        let name = self.pod.name_any();
        let name = obfuscation.map_or_else(|| name.clone(), |obfuscation| obfuscation.hash_value(&name));
        let mut heading = format!("#\n# POD {name} ({position})\n");
        if let Some(container) = self.container {
            let _ = writeln!(heading, "# CONTAINER {container}, port {}", self.port);
        }
        heading + "#\n"
    }
}

fn containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    let spec = pod.spec.iter();
    spec.flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers))
}

/// Prints each page with the name of its pod, and reports pages that could not be fetched.
async fn print_pages(
    cluster: &Cluster,
    pages: &[MetricsPage<'_>],
    obfuscation: Option<&Obfuscation>,
) -> anyhow::Result<ExitCode> {
    let mut code = ExitCode::SUCCESS;
    for (number, page) in pages.iter().enumerate() {
        let name = page.pod.name_any();
        let heading = page.heading(&format!("{} of {}", number + 1, pages.len()), obfuscation);
        match forward::get(cluster, resource::namespace(page.pod), &name, page.port, "/metrics").await {
            Ok(text) => {
                let text = obfuscation.map_or_else(|| text.clone(), |obfuscation| obfuscation.obfuscate(&text));
                crate::print(&format!("{heading}{text}"))?;
            }
            Err(error) => {
                crate::print(&heading)?;
                eprintln!("tulle: {error:#}");
                code = ExitCode::FAILURE;
            }
        }
    }
    Ok(code)
}

const EXAMPLES: &str = "\
  tulle metrics deploy/web -n shop
  tulle metrics pod/web-1 -n shop --obfuscate | gzip > metrics.gz
  tulle metrics sts";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_heading_has_the_name_of_the_pod_only_without_obfuscation() {
        let mut pod = Pod::default();
        pod.metadata.name = Some("web-1".to_owned());
        let page = MetricsPage {
            pod: &pod,
            container: None,
            port: 4191,
        };
        assert_eq!(page.heading("1 of 2", None), "#\n# POD web-1 (1 of 2)\n#\n");
        let obfuscation = Obfuscation::new();
        let hash = obfuscation.hash_value("web-1");
        assert_eq!(
            page.heading("1 of 2", Some(&obfuscation)),
            format!("#\n# POD {hash} (1 of 2)\n#\n")
        );
        assert_ne!(hash, "web-1");
    }
}
