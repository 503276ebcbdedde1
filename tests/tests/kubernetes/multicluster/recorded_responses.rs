//! Compares what another version of Linkerd's destination service answers with the recorded responses for mirrors and federated
//! Services.
//!
//! `TULLE_TEST_LINKERD` names a directory with the program. `control/tests/streams/recorded.rs` compares tulle's responses with the
//! recorded ones.

use std::fmt::Debug;

use k8s_openapi::api::core::v1::Pod;
use prost::Message;
use serde::Deserialize as _;
use tokio::time::timeout;
use tonic::{Response, Status, Streaming};
use tulle_control::tls::client::{Channel, connect_plaintext};
use tulle_core::addr::Addr;
use tulle_proto::destination::destination_client::DestinationClient;
use tulle_proto::destination::{DestinationProfile, GetDestination, Update};

use self::read::{Recorded, path, recorded};
use self::updates::endpoints_after;
use super::leadership::free_addr;
use super::linkerd_controller::{LinkerdController, LinkerdProcess};
use super::remote_endpoints::{CONTROL_PLANE, put_discovery_credentials};
use super::*;

#[path = "../../../../proto/recorded/read.rs"]
mod read;
#[path = "../../../../proto/recorded/updates.rs"]
mod updates;

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs TULLE_TEST_LINKERD"]
async fn linkerd_gives_the_recorded_responses() {
    let linkerd = LinkerdController::from_env().await;
    let (west, east) = tokio::join!(cluster(&[]), cluster(&[]));
    create_recorded_objects(&west, "destination-west").await;
    create_recorded_objects(&east, "destination-east").await;
    put_discovery_credentials(&west, &remote_access(&east).await).await;
    let (_process, channel) = start_destination(&linkerd, &west).await;
    let recordings = recorded("multicluster/destination");
    wait_for_the_other_cluster(&channel, &recordings).await;
    let _open = open_profile_streams(&channel, &recordings).await;
    let mut found = BTreeMap::new();
    for recording in &recordings {
        if let Some(difference) = difference(&channel, recording).await {
            found.insert(recording.request(), difference);
        }
    }
    for (request, reason) in expected_differences(&linkerd) {
        assert!(
            found.remove(*request).is_some(),
            "{request} has the recorded response, but is listed as different: {reason}"
        );
    }
    assert!(found.is_empty(), "{found:#?}");
}

/// Requests with another response than the recorded one, and the reason. The recording is that of edge-26.8.3.
fn expected_differences(linkerd: &LinkerdController) -> &'static [(&'static str, &'static str)] {
    if linkerd.is_before([26, 7, 1]) {
        &[(
            "profile 10.247.3.1:81",
            "a port that the Service lacks has a profile as the others; in later versions it has an empty one",
        )]
    } else {
        &[]
    }
}

/// Creates the objects of a file of the recordings, with the statuses of pods.
async fn create_recorded_objects(server: &ApiServer, name: &str) {
    for account in ["web", "all"] {
        let args = ["create", "serviceaccount", account, "-n", "shop"];
        server.kubectl(&args).await.unwrap();
    }
    let manifest = path(&format!("multicluster/{name}.yaml"));
    let args = ["apply", "--server-side", "-f", &manifest];
    server.kubectl(&args).await.unwrap();
    let pods = Api::<Pod>::namespaced(server.client(), "shop");
    let text = fs::read_to_string(&manifest).unwrap();
    for document in serde_yaml_ng::Deserializer::from_str(&text) {
        let object = Value::deserialize(document).unwrap();
        if object["kind"] == "Pod" {
            let status = json!({"status": object["status"]});
            let name = object["metadata"]["name"].as_str().unwrap();
            let params = PatchParams::default();
            pods.patch_status(name, &params, &Patch::Merge(&status)).await.unwrap();
        }
    }
}

/// Starts the destination service with the flags that it had during the recording.
async fn start_destination(linkerd: &LinkerdController, west: &ApiServer) -> (LinkerdProcess, Channel) {
    let addr = free_addr(west);
    let http2 = json!({
        "keep_alive": {"interval": {"seconds": 10}, "timeout": {"seconds": 3}, "while_idle": true},
    });
    let args = [
        format!("-addr={addr}"),
        format!("-controller-namespace={CONTROL_PLANE}"),
        "-enable-endpoint-slices=true".to_owned(),
        "-enable-ipv6=true".to_owned(),
        "-cluster-domain=cluster.local".to_owned(),
        "-identity-trust-domain=cluster.local".to_owned(),
        "-default-opaque-ports=25,587,3306,4444,5432,6379,9300,11211".to_owned(),
        format!("-meshed-http2-client-params={http2}"),
    ];
    let process = linkerd.start("destination", "destination", west, &args);
    let addr = Addr::Socket(addr);
    let connect = async || connect_plaintext(&addr).await.ok();
    let channel = eventually("the destination service listens", connect).await;
    (process, channel)
}

/// Waits until the destination service knows the objects of the cluster east. It lists each kind on its own, and answers before it
/// has done so: here Services, pods with EndpointSlices, and Servers.
async fn wait_for_the_other_cluster(channel: &Channel, recordings: &[Recorded]) {
    for request in [
        "get alias-east.shop.svc.cluster.local:80",
        "get app-east.shop.svc.cluster.local:80",
        "get app-east.shop.svc.cluster.local:7000",
    ] {
        let recording = recordings.iter().find(|recording| recording.request() == request);
        let recording = recording.unwrap();
        let is_known = async || match difference(channel, recording).await {
            None => Some(()),
            Some(difference) => {
                eprintln!("{request}, not yet as recorded:\n{difference}");
                None
            }
        };
        eventually(request, is_known).await;
    }
}

/// Opens a stream for each profile. Linkerd forgets the opaque ports of a Service when its last stream ends, and tells a later one none
/// until the Service changes; so one stays open.
async fn open_profile_streams(channel: &Channel, recordings: &[Recorded]) -> Vec<Streaming<DestinationProfile>> {
    let mut client = DestinationClient::new(channel.clone());
    let mut streams = Vec::new();
    for recording in recordings.iter().filter(|recording| recording.kind == "profile") {
        if let Ok(response) = client.get_profile(destination_request(recording)).await {
            streams.push(response.into_inner());
        }
    }
    streams
}

fn destination_request(recording: &Recorded) -> GetDestination {
    GetDestination {
        path: recording.target.clone(),
        context_token: TOKEN.to_owned(),
        ..GetDestination::default()
    }
}

/// Sends a request, and returns how the response differs from the recorded one.
async fn difference(channel: &Channel, recording: &Recorded) -> Option<String> {
    let request = destination_request(recording);
    let mut client = DestinationClient::new(channel.clone());
    if recording.kind == "profile" {
        let last = |messages: &[DestinationProfile]| messages.last().cloned();
        compare(recording, client.get_profile(request), last).await
    } else {
        let endpoints = |messages: &[Update]| endpoints_after(messages.to_vec());
        compare(recording, client.get(request), endpoints).await
    }
}

/// Reads a stream until what its messages say together is as recorded, or no message has come for a while.
async fn compare<M, V>(
    recording: &Recorded,
    call: impl Future<Output = Result<Response<Streaming<M>>, Status>>,
    value: impl Fn(&[M]) -> V,
) -> Option<String>
where
    M: Message + Default,
    V: Debug + PartialEq,
{
    let expected = match &recording.status {
        Some(status) => Err(status.clone()),
        None => {
            let messages = recording.messages.iter();
            let messages: Vec<M> = messages.map(|bytes| M::decode(&**bytes).unwrap()).collect();
            Ok(value(&messages))
        }
    };
    let mut messages = Vec::new();
    let read_all = async {
        let mut stream = call.await?.into_inner();
        while let Some(message) = stream.message().await? {
            messages.push(message);
            if expected.as_ref().is_ok_and(|expected| *expected == value(&messages)) {
                break;
            }
        }
        Ok::<_, Status>(())
    };
    let found = match timeout(SILENCE, read_all).await {
        Ok(Err(status)) => Err(format!("{:?}", status.code())),
        Ok(Ok(())) | Err(_) if !messages.is_empty() => Ok(value(&messages)),
        Ok(Ok(())) | Err(_) => Err("Silence".to_owned()),
    };
    (found != expected).then(|| format!("- {expected:?}\n+ {found:?}"))
}

const TOKEN: &str = r#"{"ns":"front","nodeName":"node-a","pod":"front-0"}"#;
/// The time for which a response is read that is not yet as recorded. `Silence` in the recordings means that no message came.
const SILENCE: Duration = Duration::from_secs(3);
