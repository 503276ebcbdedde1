//! A published value with its cached encodings.

use std::convert::Infallible;
use std::ops::Deref;
use std::sync::{Arc, Weak};

use bytes::Bytes;
use parking_lot::Mutex;

/// A published value. Subscribers with equal encoding keys share the encoded bytes.
#[derive(Debug)]
pub struct PublishedValue<T> {
    value: T,
    encodings: Mutex<Vec<CachedEncoding<T>>>,
}

/// Identifies a gRPC service in the cache of encodings. Each service encodes values to its own messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncoderId(usize);

impl EncoderId {
    pub(in crate::cluster) fn new(id: usize) -> Self {
        Self(id)
    }
}

#[derive(Debug)]
struct CachedEncoding<T> {
    encoder: EncoderId,
    /// The value that the subscribers had before; `None` for new subscribers.
    previous: Option<Weak<PublishedValue<T>>>,
    /// The zone of the subscribers.
    zone: Option<String>,
    bytes: Bytes,
}

/// Key of a cached encoding.
#[derive(Debug)]
pub struct EncodingKey<'a, T> {
    pub encoder: EncoderId,
    /// The value that the subscriber had before; `None` for a new subscriber.
    pub previous: Option<&'a Arc<PublishedValue<T>>>,
    pub zone: Option<&'a str>,
}

impl<T> EncodingKey<'_, T> {
    /// The key of an encoding that does not depend on the subscriber.
    pub fn for_all_subscribers(encoder: EncoderId) -> Self {
        Self {
            encoder,
            previous: None,
            zone: None,
        }
    }
}

impl<T> PublishedValue<T> {
    pub(in crate::cluster) fn new(value: T) -> Self {
        Self {
            value,
            encodings: Mutex::default(),
        }
    }

    /// Returns the encoded value. The first call encodes; later calls with an equal key share the bytes.
    pub fn encode_cached(&self, key: &EncodingKey<'_, T>, encode: impl FnOnce() -> Bytes) -> Bytes {
        let Ok(bytes) = self.try_encode_cached(key, || Ok::<_, Infallible>(encode()));
        bytes
    }

    /// Same as [`encode_cached`](Self::encode_cached) for an encoding that can fail.
    ///
    /// # Errors
    /// Returns the error of `encode`. Errors are not cached.
    pub fn try_encode_cached<E>(
        &self,
        key: &EncodingKey<'_, T>,
        encode: impl FnOnce() -> Result<Bytes, E>,
    ) -> Result<Bytes, E> {
        let mut all = self.encodings.lock();
        if let Some(found) = all.iter().find(|encoded| encoded.matches(key)) {
            return Ok(found.bytes.clone());
        }
        let bytes = encode()?;
        // Remove encodings whose previous value was dropped: no subscriber has it any more.
        all.retain(|encoded| {
            encoded
                .previous
                .as_ref()
                .is_none_or(|previous| previous.strong_count() > 0)
        });
        // Most values have two encodings: one for new subscribers and one relative to the previous value.
        all.reserve_exact(1);
        all.push(CachedEncoding {
            encoder: key.encoder,
            previous: key.previous.map(Arc::downgrade),
            zone: key.zone.map(str::to_owned),
            bytes: bytes.clone(),
        });
        Ok(bytes)
    }
}

impl<T: PartialEq> PartialEq for PublishedValue<T> {
    /// Cached encodings are not compared.
    fn eq(&self, other: &Self) -> bool {
        self.value == other.value
    }
}

impl<T> CachedEncoding<T> {
    fn matches(&self, key: &EncodingKey<'_, T>) -> bool {
        let is_same_previous = match (&self.previous, key.previous) {
            (None, None) => true,
            // The weak reference keeps the allocation, so the address is not reused for another value.
            (Some(ours), Some(theirs)) => std::ptr::eq(ours.as_ptr(), Arc::as_ptr(theirs)),
            (Some(_), None) | (None, Some(_)) => false,
        };
        is_same_previous && self.encoder == key.encoder && self.zone.as_deref() == key.zone
    }
}

impl<T> Deref for PublishedValue<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encodings_are_shared_by_encoder_previous_value_and_zone() {
        let (old, other) = (Arc::new(PublishedValue::new(1)), Arc::new(PublishedValue::new(1)));
        let now = PublishedValue::new(2);
        let made = std::cell::Cell::new(0_u8);
        let encoded = |by, after, zone| {
            let key = EncodingKey {
                encoder: EncoderId(by),
                previous: after,
                zone,
            };
            now.encode_cached(&key, || {
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
    fn encodings_for_dropped_previous_values_are_removed() {
        let now = PublishedValue::new(0);
        let follow = |after: &Arc<PublishedValue<i32>>| {
            let key = EncodingKey {
                encoder: EncoderId(1),
                previous: Some(after),
                zone: None,
            };
            now.encode_cached(&key, || Bytes::from_static(b"difference"));
        };
        for n in 1..100 {
            follow(&Arc::new(PublishedValue::new(n)));
        }
        assert_eq!(now.encodings.lock().len(), 1);
    }
}
