//! The transport header: a message with port, name and protocol before the data of a connection to a proxy's inbound port.

use std::num::NonZeroU16;

use bytes::{BufMut, BytesMut};
use prost::Message;
use tulle_proto::transport as proto;

/// A transport header: the target of the data that follows it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct TransportHeader {
    pub port: NonZeroU16,
    /// Set if the target is a name, which only a gateway can serve.
    pub name: Option<String>,
    /// The HTTP version of the data; absent for other protocols.
    pub protocol: Option<SessionProtocol>,
}

#[derive(Copy, Clone, Debug, Eq, PartialEq, Hash)]
pub(crate) enum SessionProtocol {
    Http1,
    Http2,
}

/// The result of decoding the first bytes of a connection that begins with a transport header.
#[derive(Debug)]
pub(crate) enum Decoded {
    Incomplete,
    Invalid(InvalidHeader),
    /// The header, and its encoded length in bytes.
    Header(TransportHeader, usize),
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum InvalidHeader {
    #[error("the bytes do not start with the preface of a transport header")]
    Preface,
    #[error("the transport header has {length} bytes, at most {MAX_HEADER_BYTES} are accepted")]
    TooLong { length: u32 },
    #[error("the transport header cannot be decoded")]
    Protobuf(#[source] prost::DecodeError),
    #[error("the transport header has port {port}, expected 1 to 65535")]
    Port { port: i32 },
}

/// Maximum size of the protobuf message, in bytes.
pub(crate) const MAX_HEADER_BYTES: u32 = 64 * 1024;

impl TransportHeader {
    pub(crate) fn encode(&self, out: &mut BytesMut) {
        let kind = self.protocol.map(|protocol| match protocol {
            SessionProtocol::Http1 => proto::session_protocol::Kind::Http1(proto::session_protocol::Http1 {}),
            SessionProtocol::Http2 => proto::session_protocol::Kind::Http2(proto::session_protocol::Http2 {}),
        });
        let message = proto::Header {
            port: i32::from(self.port.get()),
            name: self.name.clone().unwrap_or_default(),
            session_protocol: kind.map(|kind| proto::SessionProtocol { kind: Some(kind) }),
        };
        let body = message.encode_to_vec();
        let length = u32::try_from(body.len()).expect("a name fits into 4 GiB");
        out.reserve(PREFACE.len() + 4 + body.len());
        out.put_slice(PREFACE);
        out.put_u32(length);
        out.put_slice(&body);
    }

    pub(crate) fn decode(bytes: &[u8]) -> Decoded {
        let n_preface = bytes.len().min(PREFACE.len());
        if bytes[..n_preface] != PREFACE[..n_preface] {
            return Decoded::Invalid(InvalidHeader::Preface);
        }
        let Some((length, rest)) = bytes[n_preface..].split_first_chunk() else {
            return Decoded::Incomplete;
        };
        let length = u32::from_be_bytes(*length);
        if length > MAX_HEADER_BYTES {
            return Decoded::Invalid(InvalidHeader::TooLong { length });
        }
        let Some(body) = rest.get(..length as usize) else {
            return Decoded::Incomplete;
        };
        match decode_message(body) {
            Ok(header) => Decoded::Header(header, PREFACE.len() + 4 + body.len()),
            Err(reason) => Decoded::Invalid(reason),
        }
    }
}

fn decode_message(body: &[u8]) -> Result<TransportHeader, InvalidHeader> {
    use proto::session_protocol::Kind;
    let message = proto::Header::decode(body).map_err(InvalidHeader::Protobuf)?;
    let port = u16::try_from(message.port).ok().and_then(NonZeroU16::new);
    let protocol = message
        .session_protocol
        .and_then(|protocol| protocol.kind)
        .map(|kind| match kind {
            Kind::Http1(_) => SessionProtocol::Http1,
            Kind::Http2(_) => SessionProtocol::Http2,
        });
    Ok(TransportHeader {
        port: port.ok_or(InvalidHeader::Port { port: message.port })?,
        name: Some(message.name).filter(|name| !name.is_empty()),
        protocol,
    })
}

/// Precedes the length and the protobuf message.
const PREFACE: &[u8] = b"transport.l5d.io/v1\r\n\r\n";
