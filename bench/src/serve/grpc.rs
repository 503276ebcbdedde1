//! The gRPC service `tulle.bench.Echo`, and the gRPC health service, which reports every service as healthy.

use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::{Stream, StreamExt as _, stream};
use http::{Request, Response};
use hyper::body::Incoming;
use tonic::body::Body;
use tonic::codegen::Service as _;
use tonic::{Status, Streaming};
use tulle_proto::health::health_check_response::ServingStatus;
use tulle_proto::health::health_server::{Health, HealthServer};
use tulle_proto::health::{HealthCheckRequest, HealthCheckResponse};

use crate::echo::echo_server::{Echo, EchoServer};
use crate::echo::{EchoReply, EchoRequest};

use super::app::App;

pub(super) type Service = EchoServer<EchoService>;

pub(super) const ECHO_PATH_PREFIX: &str = "/tulle.bench.Echo/";
pub(super) const HEALTH_PATH_PREFIX: &str = "/grpc.health.v1.Health/";

pub(super) fn service(app: Arc<App>) -> Service {
    EchoServer::new(EchoService { app })
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES)
}

/// Answers one call. Cloning the service is cheap: it holds an `Arc`.
pub(super) async fn call(service: &Service, req: Request<Incoming>) -> Response<Body> {
    match service.clone().call(req).await {
        Ok(rsp) => rsp,
        Err(never) => match never {},
    }
}

/// Answers a health check.
pub(super) async fn health(req: Request<Incoming>) -> Response<Body> {
    match HealthServer::new(HealthService).call(req).await {
        Ok(rsp) => rsp,
        Err(never) => match never {},
    }
}

struct HealthService;

#[tonic::async_trait]
impl Health for HealthService {
    async fn check(
        &self,
        _: tonic::Request<HealthCheckRequest>,
    ) -> Result<tonic::Response<HealthCheckResponse>, Status> {
        let status = ServingStatus::Serving.into();
        Ok(tonic::Response::new(HealthCheckResponse { status }))
    }
}

pub(super) struct EchoService {
    app: Arc<App>,
}

impl EchoService {
    fn reply(&self, payload: Bytes, messages: u64, bytes: u64) -> EchoReply {
        EchoReply {
            payload,
            replica: self.app.name.clone(),
            messages,
            bytes,
        }
    }
}

type ReplyStream = Pin<Box<dyn Stream<Item = Result<EchoReply, Status>> + Send>>;

#[tonic::async_trait]
impl Echo for EchoService {
    type ServerStreamStream = ReplyStream;
    type BidiStream = ReplyStream;

    async fn unary(&self, req: tonic::Request<EchoRequest>) -> Result<tonic::Response<EchoReply>, Status> {
        let payload = req.into_inner().payload;
        let bytes = payload.len() as u64;
        Ok(tonic::Response::new(self.reply(payload, 1, bytes)))
    }

    async fn server_stream(&self, req: tonic::Request<EchoRequest>) -> Result<tonic::Response<ReplyStream>, Status> {
        let EchoRequest { payload, repeat } = req.into_inner();
        let bytes = payload.len() as u64;
        let reply = self.reply(payload, 1, bytes);
        let replies = stream::iter((0..repeat.max(1)).map(move |_| Ok(reply.clone())));
        Ok(tonic::Response::new(Box::pin(replies)))
    }

    async fn client_stream(
        &self,
        req: tonic::Request<Streaming<EchoRequest>>,
    ) -> Result<tonic::Response<EchoReply>, Status> {
        let mut incoming = req.into_inner();
        let (mut messages, mut bytes) = (0, 0);
        while let Some(message) = incoming.message().await? {
            messages += 1;
            bytes += message.payload.len() as u64;
        }
        Ok(tonic::Response::new(self.reply(Bytes::new(), messages, bytes)))
    }

    async fn bidi(&self, req: tonic::Request<Streaming<EchoRequest>>) -> Result<tonic::Response<ReplyStream>, Status> {
        let service = Self { app: self.app.clone() };
        let (mut messages, mut bytes) = (0, 0);
        let outgoing = req.into_inner().map(move |message| {
            let payload = message?.payload;
            messages += 1;
            bytes += payload.len() as u64;
            Ok(service.reply(payload, messages, bytes))
        });
        Ok(tonic::Response::new(Box::pin(outgoing)))
    }
}

/// Maximum message size. The default of gRPC, 4 MiB, is too small for bulk calls.
const MAX_MESSAGE_BYTES: usize = 64 << 20;
