//! How messages become bytes: protobuf, with buffers that are small until a message needs more.

use std::marker::PhantomData;

use prost::Message;
use tonic::codec::{BufferSettings, Codec as TonicCodec};
use tonic_prost::ProstCodec;

/// Protobuf for one method.
///
/// tonic keeps a buffer for every stream, of 8 KiB unless told otherwise: most of what an idle stream weighs, and a
/// control plane has tens of thousands of them.
#[derive(Clone, Debug)]
pub struct Codec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for Codec<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> TonicCodec for Codec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = <ProstCodec<T, U> as TonicCodec>::Encoder;
    type Decoder = <ProstCodec<T, U> as TonicCodec>::Decoder;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<T, U>::raw_encoder(settings())
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstCodec::<T, U>::raw_decoder(settings())
    }
}

fn settings() -> BufferSettings {
    BufferSettings::new(BUFFER_SIZE, YIELD_THRESHOLD)
}

/// Buffers grow by this; the header of a message and a short message fit.
const BUFFER_SIZE: usize = 512;

/// tonic's own: a full buffer goes out before the next message is looked for.
const YIELD_THRESHOLD: usize = 32 * 1024;
