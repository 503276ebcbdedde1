//! An answer as it is published, with what was made of it for all who follow it.

use std::convert::Infallible;
use std::ops::Deref;
use std::sync::{Arc, Weak};

use bytes::Bytes;
use parking_lot::Mutex;

/// One answer; equal answers are published once.
#[derive(Debug)]
pub struct Answer<T> {
    value: T,
    encoded: Mutex<Vec<Encoded<T>>>,
}

/// One service among those that encode answers: each has its own form for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encoder(pub(super) usize);

#[derive(Debug)]
struct Encoded<T> {
    by: Encoder,
    /// What its followers had before; none for those who had nothing.
    after: Option<Weak<Answer<T>>>,
    /// The zone of its followers.
    zone: Option<String>,
    bytes: Bytes,
}

/// For whom an answer is encoded: all for whom this is equal share the bytes.
#[derive(Debug)]
pub struct For<'a, T> {
    pub by: Encoder,
    /// The answer they had before, if they had one.
    pub after: Option<&'a Arc<Answer<T>>>,
    pub zone: Option<&'a str>,
}

impl<T> For<'_, T> {
    /// All who follow the answer.
    pub fn all(by: Encoder) -> Self {
        Self {
            by,
            after: None,
            zone: None,
        }
    }
}

impl<T> Answer<T> {
    pub(super) fn new(value: T) -> Self {
        Self {
            value,
            encoded: Mutex::default(),
        }
    }

    /// The answer as bytes, which the first who asks makes, and which live as long as the answer.
    pub fn encoded(&self, followers: &For<'_, T>, encode: impl FnOnce() -> Bytes) -> Bytes {
        let Ok(bytes) = self.try_encoded(followers, || Ok::<_, Infallible>(encode()));
        bytes
    }

    /// As [`encoded`](Self::encoded), of an answer that may have no such form.
    ///
    /// # Errors
    /// Those of the encoding, which is tried again for everybody.
    pub fn try_encoded<E>(
        &self,
        followers: &For<'_, T>,
        encode: impl FnOnce() -> Result<Bytes, E>,
    ) -> Result<Bytes, E> {
        let mut all = self.encoded.lock();
        if let Some(found) = all.iter().find(|encoded| encoded.is_for(followers)) {
            return Ok(found.bytes.clone());
        }
        let bytes = encode()?;
        // Nobody comes from an answer that has gone.
        all.retain(|encoded| encoded.after.as_ref().is_none_or(|after| after.strong_count() > 0));
        // Mostly one follows from the start and one from a change.
        all.reserve_exact(1);
        all.push(Encoded {
            by: followers.by,
            after: followers.after.map(Arc::downgrade),
            zone: followers.zone.map(str::to_owned),
            bytes: bytes.clone(),
        });
        Ok(bytes)
    }
}

impl<T: PartialEq> PartialEq for Answer<T> {
    /// What was made of an answer is no part of it.
    fn eq(&self, other: &Self) -> bool {
        self.value == other.value
    }
}

impl<T> Encoded<T> {
    fn is_for(&self, followers: &For<'_, T>) -> bool {
        let after = match (&self.after, followers.after) {
            (None, None) => true,
            // The weak reference keeps the address from being used again.
            (Some(ours), Some(theirs)) => std::ptr::eq(ours.as_ptr(), Arc::as_ptr(theirs)),
            (Some(_), None) | (None, Some(_)) => false,
        };
        after && self.by == followers.by && self.zone.as_deref() == followers.zone
    }
}

impl<T> Deref for Answer<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_made_once_for_all_who_come_from_the_same_answer_and_zone() {
        let (old, other) = (Arc::new(Answer::new(1)), Arc::new(Answer::new(1)));
        let now = Answer::new(2);
        let made = std::cell::Cell::new(0_u8);
        let encoded = |by, after, zone| {
            let followers = For {
                by: Encoder(by),
                after,
                zone,
            };
            now.encoded(&followers, || {
                made.set(made.get() + 1);
                Bytes::from(vec![made.get()])
            })
        };
        for _ in 0..3 {
            assert_eq!(encoded(1, None, None)[0], 1);
            assert_eq!(encoded(1, Some(&old), None)[0], 2);
            assert_eq!(encoded(1, Some(&other), None)[0], 3);
            assert_eq!(encoded(1, Some(&old), Some("east"))[0], 4);
            assert_eq!(encoded(1, Some(&old), Some("west"))[0], 5);
            assert_eq!(encoded(2, None, None)[0], 6);
        }
        assert_eq!(encoded(1, None, None).as_ptr(), encoded(1, None, None).as_ptr());
    }

    #[test]
    fn what_was_made_for_answers_that_have_gone_goes() {
        let now = Answer::new(0);
        let follow = |after: &Arc<Answer<i32>>| {
            let followers = For {
                by: Encoder(1),
                after: Some(after),
                zone: None,
            };
            now.encoded(&followers, || Bytes::from_static(b"difference"));
        };
        for n in 1..100 {
            follow(&Arc::new(Answer::new(n)));
        }
        assert_eq!(now.encoded.lock().len(), 1);
    }
}
