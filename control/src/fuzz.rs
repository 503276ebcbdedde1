//! Invariants of parsers for manifests, responses of the API server, metrics and network input. Fuzz targets check them with
//! generated input, and the tests here with the saved corpus.

use crate::identity::claims::Claims;
use crate::identity::csr::SigningRequest;
use crate::resources::event::Event;
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
