//! The conformance executor of the Rust client. It reads one JSON object a line from standard input, and writes one a
//! line to standard output. clients/conformance/README.md describes the objects.

mod calls;
mod executor;
mod json;
mod streams;

use std::time::Duration;

use executor::{Answer, Executor};
use json::Failed;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, stdin, stdout};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// Time limit of the requests that are under way at the end of the input.
const AT_THE_END: Duration = Duration::from_secs(1);

#[tokio::main(flavor = "current_thread")]
async fn main() -> std::io::Result<()> {
    let (answers, lines) = mpsc::unbounded_channel();
    let writer = tokio::spawn(write(lines));
    let mut executor = Executor::default();
    let mut under_way = JoinSet::new();
    let mut input = BufReader::new(stdin()).lines();
    while let Some(line) = input.next_line().await? {
        let request: Value = serde_json::from_str(&line)?;
        let (id, answers) = (request["id"].clone(), answers.clone());
        match executor.begin(&request) {
            Ok(rest) => {
                under_way.spawn(async move {
                    let _ = answers.send(as_line(id, rest.await));
                });
            }
            Err(failed) => {
                let _ = answers.send(as_line(id, Err(failed)));
            }
        }
        while under_way.try_join_next().is_some() {}
    }
    let _ = timeout(AT_THE_END, async { while under_way.join_next().await.is_some() {} }).await;
    under_way.shutdown().await;
    drop(answers);
    writer.await?
}

fn as_line(id: Value, answer: Answer) -> String {
    let line = match answer {
        Ok(ok) => json!({"id": id, "ok": ok}),
        Err(failed) => json!({"id": id, "error": Failed::to_json(&failed)}),
    };
    format!("{line}\n")
}

async fn write(mut lines: mpsc::UnboundedReceiver<String>) -> std::io::Result<()> {
    let mut out = stdout();
    while let Some(line) = lines.recv().await {
        out.write_all(line.as_bytes()).await?;
        out.flush().await?;
    }
    Ok(())
}
