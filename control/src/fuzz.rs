//! Invariants of parsers for manifests, responses of the API server, objects that link clusters, metrics and network input. Fuzz
//! targets check them with generated input, and the tests here with the saved corpus.

use futures_util::FutureExt as _;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::DynamicObject;
use serde_json::json;
use tulle_core::dns_names::is_dns_label;
use tulle_core::names::annotation;

use crate::identity::claims::Claims;
use crate::identity::csr::SigningRequest;
use crate::kubernetes::remote_credentials::{self, CredentialsError, KUBECONFIG_KEY};
use crate::mirror::Link;
use crate::model::remote_discovery::{FederatedMembers, RemoteDiscovery, RemoteService};
use crate::resources::event::Event;
use crate::resources::remote_discovery::{MAX_MEMBERS, discovery, invalid_members};
use crate::resources::{self, Kind, Object};
use crate::source;
use crate::telemetry::counts::SidecarValues;
use crate::webhook::review::{AdmissionResponse, ReviewOutline};

/// Parsing a manifest file is deterministic, and errors have a valid line number.
pub fn manifests(bytes: &[u8]) {
    let (events, errors) = source::load_single_file(bytes);
    for error in &errors {
        // Every byte can be a line break, because YAML has others than `\n`. An error at the end of the file can be on the line
        // after it.
        let may_exist = error.line.is_none_or(|line| (1..=bytes.len() + 2).contains(&line));
        assert!(may_exist, "{error:?} of {} bytes", bytes.len());
    }
    let (again, errors_again) = source::load_single_file(bytes);
    assert_eq!(errors, errors_again);
    assert_eq!(events.len(), again.len());
    for pair in events.iter().zip(&again) {
        match pair {
            (Event::Applied(one), Event::Applied(other)) => assert_eq!(one, other),
            (Event::Unreadable(one), Event::Unreadable(other)) => assert_eq!(one, other),
            _ => panic!("{pair:?}: loading the same file twice gave different or unexpected events"),
        }
    }
}

/// Parsing a response of the API server, in JSON or protobuf, never panics and is deterministic.
pub fn api_server_response(bytes: &[u8]) {
    let decoded = source::kubernetes::decode_response(bytes);
    assert_eq!(decoded, source::kubernetes::decode_response(bytes));
}

/// A kubeconfig that is accepted refers to no program, file or proxy.
pub fn kubeconfig(bytes: &[u8]) {
    let secret = Secret {
        data: Some([(KUBECONFIG_KEY.to_owned(), ByteString(bytes.to_vec()))].into()),
        ..Secret::default()
    };
    let read = remote_credentials::read(&secret).now_or_never();
    let access = match read.expect("a kubeconfig is read without waiting") {
        Ok(access) => access,
        Err(err) => {
            assert!(!matches!(err, CredentialsError::NoKubeconfig), "{err}");
            return;
        }
    };
    let (config, user) = (&access.config, &access.config.auth_info);
    let references = [
        user.exec.is_some(),
        user.auth_provider.is_some(),
        user.token_file.is_some(),
        user.client_certificate.is_some(),
        user.client_key.is_some(),
        config.root_cert_file.is_some(),
        config.proxy_url.is_some(),
    ];
    assert_eq!(references, [false; 7]);
}

/// A valid Link names a cluster, its domain and its Secret, and the values for its gateway and probe can be used.
pub fn link(bytes: &[u8]) {
    let Ok(object) = serde_json::from_slice::<DynamicObject>(bytes) else {
        return;
    };
    let Ok(link) = Link::parse(&object) else { return };
    assert_eq!(Link::cluster_name(&object), Some(&*link.cluster));
    assert!(is_dns_label(&link.cluster), "{link:?}");
    assert!(
        !link.domain.is_empty() && !link.credentials_secret.is_empty(),
        "{link:?}"
    );
    if let Some(gateway) = &link.gateway {
        assert!(!gateway.hosts.is_empty() && gateway.port > 0, "{link:?}");
        for host in &gateway.hosts {
            assert!(!host.is_empty() && !host.contains(','), "{link:?}");
        }
    }
    if let Some(probe) = &link.probe {
        assert!(probe.path.starts_with('/') && probe.port > 0, "{link:?}");
        assert!(!probe.period.is_zero() && !probe.timeout.is_zero(), "{link:?}");
        assert!(probe.failure_threshold > 0, "{link:?}");
    }
}

/// Each entry in the list of a federated Service is a member or is reported, and the list of its members has the same members.
pub fn federated_members(bytes: &[u8]) {
    let list = String::from_utf8_lossy(bytes);
    let (members, reported) = read_members(&list);
    let n_entries = list.split(',').filter(|entry| !entry.trim().is_empty()).count();
    assert_eq!(members.remote.len() + reported, n_entries, "{list:?}");
    assert!(members.remote.len() <= MAX_MEMBERS, "{list:?}");
    let entry = |member: &RemoteService| format!("{}@{}", member.name, member.cluster);
    let entries: Vec<_> = members.remote.iter().map(entry).collect();
    let again = read_members(&entries.join(","));
    assert_eq!(again, (members, 0), "{list:?}");
}

/// Returns the members of a federated Service with this list, and the number of entries that are not members.
fn read_members(list: &str) -> (FederatedMembers, usize) {
    let metadata = json!({
        "name": "web-federated", "namespace": "shop", "annotations": { (annotation::REMOTE_DISCOVERY): list },
    });
    let service = match resources::decode(Kind::Service, json!({ "metadata": metadata, "spec": {} })) {
        Ok(Object::Service(service)) => service,
        other => panic!("{other:?}"),
    };
    match discovery(&service) {
        Some(RemoteDiscovery::Federated(members)) => (members, invalid_members(&service.meta).len()),
        other => panic!("{other:?}"),
    }
}

/// Parsing metrics never panics. The rates between a page and itself are 0, and the rates since an empty page equal the counts
/// of the page.
pub fn metrics(bytes: &[u8]) {
    let counts = SidecarValues::parse(&String::from_utf8_lossy(bytes));
    for rates in counts.rates_since(&counts, 1.0).per_second.sources.values() {
        assert_eq!(rates.requests(), 0.0);
    }
    let all = counts.rates_since(&SidecarValues::default(), 1.0).per_second;
    assert_eq!(all, counts);
    for rates in all
        .sources
        .values()
        .chain(all.destinations.values())
        .chain(all.routes.values())
    {
        assert!(
            rates.success_rate().is_none_or(|rate| (0.0..=1.0).contains(&rate)),
            "{rates:?}"
        );
        assert!(rates.quantile_ms(0.99).is_none_or(|ms| ms >= 0.0), "{rates:?}");
    }
}

/// Parsing an unverified token never panics, and claims that are rejected at one time are rejected at every later time.
pub fn token(bytes: &[u8]) {
    if let Ok(claims) = Claims::parse(bytes) {
        let checked = [0, 1 << 32, u64::MAX].map(|now| claims.check(now, &[]));
        // All `Ok` come before the first `Err`.
        assert!(checked.is_sorted_by_key(Result::is_err), "{claims:?}: {checked:?}");
    }
}

/// A signing request that can be parsed is not accepted for two identities.
pub fn signing_request(bytes: &[u8]) {
    if let Ok(request) = SigningRequest::parse(bytes) {
        let identities = ["web.shop.serviceaccount.identity.linkerd.cluster.local", ""];
        let accepted = identities.map(|identity| request.check_names(identity).is_ok());
        assert_ne!(accepted, [true; 2], "{request:?}");
    }
}

/// Every review that can be parsed gets a response with its id.
pub fn review(bytes: &[u8]) {
    if let Ok(review) = ReviewOutline::parse(bytes.to_vec().into()) {
        let response = AdmissionResponse::deny("no")
            .to_json(&review.id)
            .expect("a response is JSON");
        let response: serde_json::Value = serde_json::from_slice(&response).expect("the response can be parsed");
        assert_eq!(response["response"]["uid"], review.id.uid);
        assert_eq!(response["response"]["allowed"], false);
        let _ = review.decode();
        let _ = review.decode_head();
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    #[test]
    fn saved_manifests_satisfy_the_invariants() {
        check_corpus("manifests", super::manifests);
    }

    #[test]
    fn saved_api_server_responses_satisfy_the_invariants() {
        check_corpus("api_server_response", super::api_server_response);
    }

    #[test]
    fn saved_kubeconfigs_satisfy_the_invariants() {
        check_corpus("kubeconfig", super::kubeconfig);
    }

    #[test]
    fn saved_links_satisfy_the_invariants() {
        check_corpus("link", super::link);
    }

    #[test]
    fn saved_lists_of_members_satisfy_the_invariants() {
        check_corpus("federated_members", super::federated_members);
    }

    #[test]
    fn saved_metrics_satisfy_the_invariants() {
        check_corpus("metrics", super::metrics);
    }

    #[test]
    fn saved_tokens_satisfy_the_invariants() {
        check_corpus("token", super::token);
    }

    #[test]
    fn saved_signing_requests_satisfy_the_invariants() {
        check_corpus("signing_request", super::signing_request);
    }

    #[test]
    fn saved_reviews_satisfy_the_invariants() {
        check_corpus("review", super::review);
    }

    fn check_corpus(name: &str, check: fn(&[u8])) {
        let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz");
        // The fuzz targets are not compiled in this workspace, so this checks that the target still calls the function.
        let source = fs::read_to_string(fuzz.join(format!("fuzz_targets/{name}.rs"))).unwrap();
        assert!(source.contains(&format!("tulle_control::fuzz::{name}(")), "{source}");
        let dir = fuzz.join("corpus").join(name);
        let mut n = 0;
        for file in fs::read_dir(&dir).unwrap() {
            let path = file.unwrap().path();
            println!("{}", path.display());
            check(&fs::read(path).unwrap());
            n += 1;
        }
        assert!(n > 0, "{} is empty", dir.display());
    }
}
