//! What must hold of manifests, metrics and what strangers send, whatever is in them: fuzz targets try it with bytes of their making, and the
//! tests here with those that they found worth keeping.

use crate::identity::claims::Claims;
use crate::identity::csr::SigningRequest;
use crate::resources::event::Event;
use crate::source;
use crate::telemetry::counts::Counts;
use crate::webhook::review::{Answer, Review};

/// A file of manifests is read or refused, at a line that it may have; and in the same way each time.
pub fn manifests(bytes: &[u8]) {
    let (events, errors) = source::of_one_file(bytes);
    for error in &errors {
        // YAML has many a line break; and what is missing at the end is missing on the line behind it.
        let may_exist = error.line.is_none_or(|line| (1..=bytes.len() + 2).contains(&line));
        assert!(may_exist, "{error:?} of {} bytes", bytes.len());
    }
    let (again, errors_again) = source::of_one_file(bytes);
    assert_eq!(errors, errors_again);
    assert_eq!(events.len(), again.len());
    for pair in events.iter().zip(&again) {
        match pair {
            (Event::Applied(one), Event::Applied(other)) => assert_eq!(one, other),
            (Event::Unreadable(one), Event::Unreadable(other)) => assert_eq!(one, other),
            _ => panic!("{pair:?} of a file that is new"),
        }
    }
}

/// The page of a sidecar is read, whatever is on it; nothing grows out of nothing, and everything out of what was not.
pub fn metrics(bytes: &[u8]) {
    let counts = Counts::parse(&String::from_utf8_lossy(bytes));
    for tally in counts.since(&counts, 1.0).sources.values() {
        assert_eq!(tally.requests(), 0.0);
    }
    let all = counts.since(&Counts::default(), 1.0);
    assert_eq!(all, counts);
    for tally in all
        .sources
        .values()
        .chain(all.targets.values())
        .chain(all.routes.values())
    {
        assert!(
            tally.success_rate().is_none_or(|rate| (0.0..=1.0).contains(&rate)),
            "{tally:?}"
        );
        assert!(tally.quantile_ms(0.99).is_none_or(|ms| ms >= 0.0), "{tally:?}");
    }
}

/// A token is read or refused before anybody has verified it, and no token becomes acceptable by getting older.
pub fn token(bytes: &[u8]) {
    if let Ok(claims) = Claims::parse(bytes) {
        let checked = [0, 1 << 32, u64::MAX].map(|now| claims.check(now, &[]));
        assert!(checked.is_sorted_by_key(Result::is_err), "{claims:?}: {checked:?}");
    }
}

/// A signing request that is read asks for one identity at most.
pub fn signing_request(bytes: &[u8]) {
    if let Ok(request) = SigningRequest::parse(bytes) {
        let identities = ["web.shop.serviceaccount.identity.linkerd.cluster.local", ""];
        let asked_for = identities.map(|identity| request.check_names(identity).is_ok());
        assert_ne!(asked_for, [true; 2], "{request:?}");
    }
}

/// A review that is read is answered, to whom has asked.
pub fn review(bytes: &[u8]) {
    if let Ok(review) = Review::parse(bytes) {
        let answer = Answer::deny("no").to_json(&review.id).expect("an answer is JSON");
        let answer: serde_json::Value = serde_json::from_slice(&answer).expect("it is read again");
        assert_eq!(answer["response"]["uid"], review.id.uid);
        assert_eq!(answer["response"]["allowed"], false);
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    #[test]
    fn manifests_that_were_kept_hold() {
        hold("manifests", super::manifests);
    }

    #[test]
    fn metrics_that_were_kept_hold() {
        hold("metrics", super::metrics);
    }

    #[test]
    fn tokens_that_were_kept_hold() {
        hold("token", super::token);
    }

    #[test]
    fn signing_requests_that_were_kept_hold() {
        hold("signing_request", super::signing_request);
    }

    #[test]
    fn reviews_that_were_kept_hold() {
        hold("review", super::review);
    }

    fn hold(name: &str, check: fn(&[u8])) {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(name);
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
