//! A published value with its cached encodings. Streams that begin at about the same time, or that send the same change, share an
//! encoding.

use std::convert::Infallible;
use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, Weak};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::task::yield_now;

/// A published value. Subscribers with equal encoding keys share the encoded bytes.
#[derive(Debug)]
pub struct PublishedValue<T> {
    value: T,
    encodings: Mutex<Vec<CachedEncoding<T>>>,
}

/// Identifies the gRPC service whose encodings are cached in the values.
#[derive(Clone, Debug)]
pub struct EncoderId {
    id: usize,
    values: Arc<ValuesWithEncodings>,
}

impl EncoderId {
    pub(in crate::cluster) fn new(id: usize, values: Arc<ValuesWithEncodings>) -> Self {
        Self { id, values }
    }
}

/// The values that have cached encodings.
#[derive(Default)]
pub(in crate::cluster) struct ValuesWithEncodings(Mutex<Vec<Weak<dyn CachedEncodings>>>);

impl ValuesWithEncodings {
    /// Removes the encodings that were not used since the last call. Yields to other tasks now and then.
    pub(in crate::cluster) async fn remove_unused(&self) {
        let values = std::mem::take(&mut *self.0.lock());
        let mut values_with_encodings = Vec::new();
        for values in values.chunks(VALUES_BETWEEN_YIELDS) {
            for value in values {
                let has_encodings_left = value.upgrade().is_some_and(|value| value.remove_unused());
                if has_encodings_left {
                    values_with_encodings.push(value.clone());
                }
            }
            yield_now().await;
        }
        self.0.lock().append(&mut values_with_encodings);
    }
}

impl fmt::Debug for ValuesWithEncodings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ValuesWithEncodings")
            .field(&self.0.lock().len())
            .finish()
    }
}

trait CachedEncodings: Send + Sync {
    /// Removes the encodings that were not used since the last call. Returns whether some are left.
    fn remove_unused(&self) -> bool;
}

impl<T: Send + Sync> CachedEncodings for PublishedValue<T> {
    fn remove_unused(&self) -> bool {
        let mut all = self.encodings.lock();
        all.retain_mut(|encoded| std::mem::take(&mut encoded.is_used));
        all.shrink_to_fit();
        !all.is_empty()
    }
}

#[derive(Debug)]
struct CachedEncoding<T> {
    encoder_id: usize,
    /// Used since unused encodings were last removed.
    is_used: bool,
    /// The value that the subscribers had before; `None` for new subscribers.
    previous: Option<Weak<PublishedValue<T>>>,
    /// The zone of the subscribers.
    zone: Option<String>,
    bytes: Bytes,
}

/// Key of a cached encoding.
#[derive(Debug)]
pub struct EncodingKey<'a, T> {
    pub encoder: &'a EncoderId,
    /// The value that the subscriber had before; `None` for a new subscriber.
    pub previous: Option<&'a Arc<PublishedValue<T>>>,
    pub zone: Option<&'a str>,
}

impl<'a, T> EncodingKey<'a, T> {
    /// The key of an encoding that does not depend on the subscriber.
    pub fn for_all_subscribers(encoder: &'a EncoderId) -> Self {
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
}

impl<T: Send + Sync + 'static> PublishedValue<T> {
    /// Returns the encoded value. The first call encodes; later calls with an equal key share the bytes.
    pub fn encode_cached(self: &Arc<Self>, key: &EncodingKey<'_, T>, encode: impl FnOnce() -> Bytes) -> Bytes {
        let Ok(bytes) = self.try_encode_cached(key, || Ok::<_, Infallible>(encode()));
        bytes
    }

    /// Same as [`encode_cached`](Self::encode_cached) for an encoding that can fail.
    ///
    /// # Errors
    /// Returns the error of `encode`. Errors are not cached.
    pub fn try_encode_cached<E>(
        self: &Arc<Self>,
        key: &EncodingKey<'_, T>,
        encode: impl FnOnce() -> Result<Bytes, E>,
    ) -> Result<Bytes, E> {
        let mut all = self.encodings.lock();
        if let Some(found) = all.iter_mut().find(|encoded| encoded.matches(key)) {
            found.is_used = true;
            return Ok(found.bytes.clone());
        }
        let bytes = encode()?;
        // A value that has encodings is already in the list of such values.
        let is_listed = !all.is_empty();
        // Remove encodings whose previous value was dropped: no subscriber has it any more.
        all.retain(|encoded| {
            encoded
                .previous
                .as_ref()
                .is_none_or(|previous| previous.strong_count() > 0)
        });
        if !is_listed {
            let value: Weak<dyn CachedEncodings> = Arc::downgrade(self) as _;
            key.encoder.values.0.lock().push(value);
        }
        // Grows by one, because most values have only two encodings: for new subscribers, and relative to the previous value.
        all.reserve_exact(1);
        all.push(CachedEncoding {
            encoder_id: key.encoder.id,
            is_used: true,
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
        is_same_previous && self.encoder_id == key.encoder.id && self.zone.as_deref() == key.zone
    }
}

impl<T> Deref for PublishedValue<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

/// Number of values that are checked before `remove_unused` yields to other tasks.
const VALUES_BETWEEN_YIELDS: usize = 1000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encodings_are_shared_by_encoder_previous_value_and_zone() {
        let (old, other) = (Arc::new(PublishedValue::new(1)), Arc::new(PublishedValue::new(1)));
        let now = Arc::new(PublishedValue::new(2));
        let made = std::cell::Cell::new(0_u8);
        let encoded = |by, after, zone| {
            let key = EncodingKey {
                encoder: &EncoderId::new(by, Arc::default()),
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
        let now = Arc::new(PublishedValue::new(0));
        let listed = Arc::<ValuesWithEncodings>::default();
        let follow = |after: &Arc<PublishedValue<i32>>| {
            let key = EncodingKey {
                encoder: &EncoderId::new(1, listed.clone()),
                previous: Some(after),
                zone: None,
            };
            now.encode_cached(&key, || Bytes::from_static(b"difference"));
        };
        for n in 1..100 {
            follow(&Arc::new(PublishedValue::new(n)));
        }
        assert_eq!(now.encodings.lock().len(), 1);
        assert_eq!(listed.0.lock().len(), 1);
    }

    #[tokio::test]
    async fn encodings_are_kept_while_they_are_used() {
        let listed = Arc::<ValuesWithEncodings>::default();
        let encoder = EncoderId::new(1, listed.clone());
        let (value, dropped) = (Arc::new(PublishedValue::new(1)), Arc::new(PublishedValue::new(2)));
        let n_encoded = std::cell::Cell::new(0);
        let encode = |value: &Arc<PublishedValue<i32>>| {
            value.encode_cached(&EncodingKey::for_all_subscribers(&encoder), || {
                n_encoded.set(n_encoded.get() + 1);
                Bytes::from_static(b"a message")
            });
            n_encoded.get()
        };
        assert_eq!((encode(&value), encode(&dropped)), (1, 2));
        drop(dropped);
        for _ in 0..3 {
            listed.remove_unused().await;
            assert_eq!(encode(&value), 2);
        }
        assert_eq!(listed.0.lock().len(), 1);
        listed.remove_unused().await;
        listed.remove_unused().await;
        assert!(value.encodings.lock().is_empty() && listed.0.lock().is_empty());
        assert_eq!(encode(&value), 3);
        assert_eq!(listed.0.lock().len(), 1);
    }
}
