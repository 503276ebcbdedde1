//! `tulle diagnostics`: sends the queries of a proxy to a running control plane, and prints the responses.
//!
//! The command changes nothing. The control plane accepts plaintext only from loopback, so the command reaches its pods through
//! ports that the API server forwards. Without Kubernetes, the command must run on the machine of the control plane.

mod context;
mod endpoints;
mod json;
mod policy;
mod profile;

use std::process::ExitCode;

use clap::Subcommand;

use self::context::{QueryContext, ServerArgs};
use crate::{kubernetes, metrics, runtime};

#[derive(clap::Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    query: Query,
    #[command(flatten)]
    server: ServerArgs,
}

#[derive(Clone, Debug, Subcommand)]
enum Query {
    /// The endpoints of services
    Endpoints(endpoints::Args),
    /// The profile of a service or an address
    Profile(profile::Args),
    /// The policy of a workload's port, or how a client's traffic to an address is routed
    Policy(policy::Args),
    /// The metrics of the control plane
    ControllerMetrics,
    /// The metrics of proxies
    ProxyMetrics(metrics::ProxyMetricsArgs),
}

/// Sends the query and prints the response.
pub(crate) fn main(args: &Args, flags: &kubernetes::Flags) -> anyhow::Result<ExitCode> {
    match &args.query {
        Query::ControllerMetrics => return metrics::print_controller_metrics(flags),
        Query::ProxyMetrics(proxies) => return metrics::print_proxy_metrics(proxies, flags),
        Query::Endpoints(_) | Query::Profile(_) | Query::Policy(_) => {}
    }
    let query_context = QueryContext {
        args: &args.server,
        flags,
    };
    let text = runtime()?.block_on(async {
        match &args.query {
            Query::Endpoints(args) => Box::pin(endpoints::query(&query_context, args)).await,
            Query::Profile(args) => Box::pin(profile::query(&query_context, args)).await,
            Query::Policy(args) => Box::pin(policy::query(&query_context, args)).await,
            Query::ControllerMetrics | Query::ProxyMetrics(_) => Ok(String::new()),
        }
    })?;
    crate::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

const EXAMPLES: &str = "\
  tulle diagnostics endpoints web.shop.svc.cluster.local:80
  tulle diagnostics profile 10.96.0.10:80
  tulle diagnostics policy deploy/web 8080 -n shop
  tulle diagnostics policy svc/web 80 -n shop
  tulle diagnostics proxy-metrics deploy/web -n shop

Without Kubernetes, on the machine of the control plane:

  tulle diagnostics endpoints web.shop.svc.cluster.local:80 --destination-addr 127.0.0.1:8086
  tulle diagnostics policy shop/web-1 8080 --policy-addr 127.0.0.1:8090
  tulle diagnostics policy --outbound 10.96.0.10:80 --namespace shop --policy-addr 127.0.0.1:8090";
