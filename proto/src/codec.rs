//! The protobuf codec, with buffers that are small until a message needs more.

use std::marker::PhantomData;

use prost::Message;
use tonic::codec::{BufferSettings, Codec as TonicCodec};
use tonic_prost::ProstCodec;

/// Protobuf codec for one method.
///
/// tonic allocates an 8 KiB buffer for every stream by default, which is most of the memory of an idle stream. A control
/// plane has tens of thousands of streams.
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

/// Initial size and growth of buffers, in bytes; a frame header and a short message fit.
const BUFFER_SIZE: usize = 512;

/// tonic's default: a buffer that reaches this size is sent before the next message is polled.
const YIELD_THRESHOLD: usize = 32 * 1024;
