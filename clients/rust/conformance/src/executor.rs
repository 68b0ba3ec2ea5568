//! Carries out the requests of the runner.

use std::collections::HashMap;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use kvgrpc::v1::cancel_transfer_request::Target;
use kvgrpc::v1::{HandOver, LeaseRef, LeaseState, TransferFilter, WaitCondition};
use kvgrpc::{Client, Keeper, Moving, Options, Position, Side, TlsFiles, clean_up, connect};
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::calls::{self, Beside, Call};
use crate::json::{Failed, decode, encode, read, types_of, write};
use crate::streams::Stream;

pub type Answer = Result<Value, Failed>;
/// The rest of a request once its names are known.
pub type Rest = Pin<Box<dyn Future<Output = Answer> + Send>>;

/// Returns the options of a client that a request describes.
fn options(request: &Value) -> Options {
    let path = |name: &str| request["tls"][name].as_str().map(PathBuf::from);
    let known = path("dir").map(TlsFiles::in_folder).unwrap_or_default();
    let files = TlsFiles {
        cert: path("cert").or(known.cert),
        key: path("key").or(known.key),
        ca: path("ca").unwrap_or(known.ca),
    };
    Options {
        tls_files: request["tls"].is_object().then_some(files),
        token: request["token"].as_str().map(str::to_owned),
        token_file: request["tokenFile"].as_str().map(PathBuf::from),
        ..Default::default()
    }
}

/// The names that requests have defined.
#[derive(Default)]
pub struct Executor {
    clients: HashMap<String, Client>,
    streams: HashMap<String, Arc<Stream>>,
    keepers: HashMap<String, (String, Keeper)>,
}

impl Executor {
    /// Begins a request. Requests begin in the order in which they come; the rest may take longer.
    pub fn begin(&mut self, request: &Value) -> Result<Rest, Failed> {
        match text(request, "op")? {
            "hello" => done(json!({"language": "rust", "version": env!("KVGRPC_RUST_VERSION")})),
            "connect" => {
                let client = connect(text(request, "address")?, options(request))?;
                self.clients.insert(text(request, "server")?.to_owned(), client);
                done(json!({}))
            }
            "call" => self.call(request),
            "open" => self.open(request),
            "send" => {
                self.stream(request)?.send(&request["request"])?;
                done(json!({}))
            }
            "finish" => {
                self.stream(request)?.finish();
                done(json!({}))
            }
            "next" => {
                let (stream, patience) = (Arc::clone(self.stream(request)?), seconds(request, "timeoutS")?);
                Ok(Box::pin(async move { stream.next(patience).await }))
            }
            "cancel" => {
                self.stream(request)?.cancel();
                done(json!({}))
            }
            "wait" => self.wait(request),
            "pull" => self.pull(request),
            "move" => self.move_blocks(request),
            "redacted" => {
                let method = text(request, "method")?;
                let message = encode(&types_of(method)?.0, &request["request"])?;
                let unknown = || Failed::Executor(format!("no method {method}"));
                done(json!({"text": calls::redacted(method, &message).ok_or_else(unknown)?}))
            }
            "watch" => {
                let watch = self.client(request)?.watch(filter(request)?, position(&request["after"])?);
                self.add(request, Stream::watch(text(request, "server")?, watch))?;
                done(json!({}))
            }
            "watchEngine" => {
                let watch = self.client(request)?.watch_engine(None);
                self.add(request, Stream::watch_engine(text(request, "server")?, watch))?;
                done(json!({}))
            }
            "keepAlive" => self.keep_alive(request),
            "kept" => self.kept(request),
            "stopKeeping" => {
                self.keepers.remove(text(request, "keeper")?);
                done(json!({}))
            }
            "cleanUp" => self.clean_up(request),
            "close" => {
                let server = text(request, "server")?;
                self.clients.remove(server);
                self.keepers.retain(|_, (of, _)| of != server);
                self.streams.values().filter(|stream| stream.server == server).for_each(|stream| stream.cancel());
                done(json!({}))
            }
            other => Err(Failed::Executor(format!("no op {other}"))),
        }
    }

    fn call(&self, request: &Value) -> Result<Rest, Failed> {
        let method = text(request, "method")?.to_owned();
        let channel = self.client(request)?.channel();
        let (asked, answer) = types_of(&method)?;
        let empty = json!({});
        let message = if request["request"].is_null() { &empty } else { &request["request"] };
        let call = Call { message: encode(&asked, message)?, beside: Beside::of(request)? };
        Ok(Box::pin(async move {
            let streaming = || Failed::Executor(format!("{method} is a stream"));
            let reply = calls::unary(channel, &method, call).await.ok_or_else(streaming)??;
            Ok(json!({"reply": decode(&answer, &reply)}))
        }))
    }

    fn open(&mut self, request: &Value) -> Result<Rest, Failed> {
        let (server, method) = (text(request, "server")?, text(request, "method")?);
        let channel = self.client(request)?.channel();
        let (stream, metadata) = Stream::open(server, channel, method, &request["request"], Beside::of(request)?)?;
        self.add(request, stream)?;
        let unary = Failed::Executor(format!("{method} is no stream"));
        Ok(Box::pin(async move { Ok(json!({"metadata": metadata.await.map_err(|_| unary)?})) }))
    }

    fn wait(&self, request: &Value) -> Result<Rest, Failed> {
        let client = self.client(request)?.clone();
        let transfer_id = text(request, "transferId")?.to_owned();
        let until = format!("WAIT_CONDITION_{}", request["until"].as_str().unwrap_or("ENDED"));
        let unknown = || Failed::Executor(format!("no condition {until}"));
        let until = WaitCondition::from_str_name(&until).ok_or_else(unknown)?;
        let patience = seconds(request, "timeoutS")?;
        Ok(Box::pin(async move {
            let waited = client.wait(transfer_id, until, patience).await?;
            Ok(json!({"transfer": write("Transfer", &waited.transfer), "conditionMet": waited.condition_met}))
        }))
    }

    fn pull(&self, request: &Value) -> Result<Rest, Failed> {
        let (client, timeout) = (self.client(request)?.clone(), seconds(request, "timeoutS")?);
        let asked = read("PullBlocksRequest", &request["request"])?;
        Ok(Box::pin(async move {
            let transfer = client.pull(asked, timeout).await?;
            Ok(json!({"transfer": write("Transfer", &transfer)}))
        }))
    }

    fn move_blocks(&self, request: &Value) -> Result<Rest, Failed> {
        let (source, name) = (self.client(request)?.clone(), text(request, "to")?);
        let unknown = || Failed::Executor(format!("no server {name}"));
        let destination = self.clients.get(name).ok_or_else(unknown)?.clone();
        let asked: HandOver = read("HandOver", &request["request"])?;
        let request_id = request["requestId"].as_str().unwrap_or_default().to_owned();
        let moving = Moving { request_id, timeout: seconds(request, "timeoutS")?, ..Default::default() };
        Ok(Box::pin(async move {
            let (blocks, content) = (asked.blocks.unwrap_or_default(), asked.content.unwrap_or_default());
            let moved = kvgrpc::move_blocks(&source, &destination, blocks, content, moving).await?;
            Ok(json!({"transfer": write("Transfer", &moved.transfer), "blocks": write("Blocks", &moved.blocks)}))
        }))
    }

    fn keep_alive(&mut self, request: &Value) -> Result<Rest, Failed> {
        let leases = list(request, "leases").map(|lease| read::<LeaseRef>("LeaseRef", lease));
        let leases = leases.collect::<Result<Vec<_>, _>>()?;
        let ttl = if request["ttlS"].is_null() { None } else { Some(seconds(request, "ttlS")?) };
        let keeper = self.client(request)?.keep_alive(leases, ttl);
        let server = text(request, "server")?.to_owned();
        self.keepers.insert(text(request, "keeper")?.to_owned(), (server, keeper));
        done(json!({}))
    }

    fn kept(&self, request: &Value) -> Result<Rest, Failed> {
        let name = text(request, "keeper")?;
        let (_, keeper) = self.keepers.get(name).ok_or_else(|| Failed::Executor(format!("no keeper {name}")))?;
        let index = request["index"].as_u64().and_then(|index| usize::try_from(index).ok()).unwrap_or_default();
        let over = keeper.over(index);
        let patience = seconds(request, "timeoutS")?;
        Ok(Box::pin(async move {
            // A lease that is not known to be over is live.
            let state = timeout(patience, over).await.map_or(LeaseState::Live, |kept| kept.state);
            Ok(json!({"state": state.as_str_name().trim_start_matches("LEASE_STATE_")}))
        }))
    }

    fn clean_up(&self, request: &Value) -> Result<Rest, Failed> {
        let mut sides = Vec::new();
        for side in list(request, "sides") {
            // A side in JSON is a CancelTransferRequest and a server.
            let mut asked = side.clone();
            asked.as_object_mut().ok_or_else(|| Failed::Executor("a side is an object".into()))?.remove("server");
            let asked: kvgrpc::v1::CancelTransferRequest = read("CancelTransferRequest", &asked)?;
            sides.push(Side {
                client: self.client(side)?.clone(),
                target: asked.target.unwrap_or(Target::TransferKey(Vec::new())),
                free_allocation_ids: asked.free_allocation_ids,
            });
        }
        let message = request["message"].as_str().unwrap_or_default().to_owned();
        Ok(Box::pin(async move {
            let answers = clean_up(sides, &message).await;
            let outcomes: Vec<_> = answers
                .into_iter()
                .map(|answer| match answer {
                    Ok(reply) => reply.outcome().as_str_name().trim_start_matches("CANCEL_OUTCOME_").to_owned(),
                    Err(error) if error.reason_name().is_empty() => error.code_name().to_owned(),
                    Err(error) => error.reason_name().to_owned(),
                })
                .collect();
            Ok(json!({"outcomes": outcomes}))
        }))
    }

    fn add(&mut self, request: &Value, stream: Stream) -> Result<(), Failed> {
        let name = text(request, "stream")?.to_owned();
        if let Some(former) = self.streams.insert(name, Arc::new(stream)) {
            former.cancel();
        }
        Ok(())
    }

    fn client(&self, request: &Value) -> Result<&Client, Failed> {
        let name = text(request, "server")?;
        self.clients.get(name).ok_or_else(|| Failed::Executor(format!("no server {name}")))
    }

    fn stream(&self, request: &Value) -> Result<&Arc<Stream>, Failed> {
        let name = text(request, "stream")?;
        self.streams.get(name).ok_or_else(|| Failed::Executor(format!("no stream {name}")))
    }
}

fn done(answer: Value) -> Result<Rest, Failed> {
    Ok(Box::pin(std::future::ready(Ok(answer))))
}

fn text<'a>(request: &'a Value, field: &str) -> Result<&'a str, Failed> {
    request[field].as_str().ok_or_else(|| Failed::Executor(format!("{field} is missing")))
}

fn seconds(request: &Value, field: &str) -> Result<Duration, Failed> {
    let given = request[field].as_f64().ok_or_else(|| Failed::Executor(format!("{field} is missing")))?;
    Duration::try_from_secs_f64(given).map_err(|error| Failed::Executor(format!("{field}: {error}")))
}

fn list<'a>(request: &'a Value, field: &str) -> impl Iterator<Item = &'a Value> {
    request[field].as_array().into_iter().flatten()
}

fn filter(request: &Value) -> Result<TransferFilter, Failed> {
    if request["filter"].is_null() { Ok(TransferFilter::default()) } else { read("TransferFilter", &request["filter"]) }
}

/// Reads a position from an object with the fields of a ResponseHeader.
fn position(after: &Value) -> Result<Option<Position>, Failed> {
    if after.is_null() {
        return Ok(None);
    }
    let header: kvgrpc::v1::ResponseHeader = read("ResponseHeader", after)?;
    Ok(Some(Position::from(&header)))
}
