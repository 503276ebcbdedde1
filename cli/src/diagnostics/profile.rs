//! `tulle diagnostics profile`: the profile that the control plane sends to a proxy for a name or an address.

use tonic::Status;
use tulle_proto::destination::GetDestination;
use tulle_proto::destination::destination_client::DestinationClient;

use super::context::{QueryContext, format_response};
use super::json;

#[derive(clap::Args, Clone, Debug)]
pub(super) struct Args {
    /// <service>.<namespace>.svc.<domain>:<port>, or <ip>:<port>
    #[arg(value_name = "NAME_OR_IP:PORT")]
    target: String,
    /// The namespace of the client, whose own ServiceProfiles take precedence
    #[arg(short, long)]
    namespace: Option<String>,
}

pub(super) async fn query(query_context: &QueryContext<'_>, args: &Args) -> anyhow::Result<String> {
    let mut client = DestinationClient::new(query_context.connect_to_destination().await?);
    let token = |namespace| serde_json::json!({ "ns": namespace }).to_string();
    let request = GetDestination {
        path: args.target.clone(),
        context_token: args.namespace.as_ref().map(token).unwrap_or_default(),
        ..GetDestination::default()
    };
    let exchange = async {
        let mut profiles = client.get_profile(request).await?.into_inner();
        profiles
            .message()
            .await?
            .ok_or_else(|| Status::unavailable("the stream ended without a response"))
    };
    let profile = query_context.with_timeout("Destination API", exchange).await?;
    format_response(&json::profile::profile(&profile), query_context.output())
}
