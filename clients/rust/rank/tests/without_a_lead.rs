//! What a rank says where there is no lead, or one that says nothing right.

use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::Duration;
use std::{env, fs, process, thread};

use kvgrpc_rank::{Rank, Ticket};

fn ticket(path: &str) -> Ticket {
    Ticket { socket_path: path.into(), secret: b"secret".to_vec(), comes_back: Duration::ZERO, memory_bytes: 0 }
}

#[test]
fn where_no_lead_listens_the_attach_is_unavailable() {
    for path in ["/nowhere/lead.sock", "", "a\0b"] {
        let error = Rank::attach(&ticket(path), 0).err().expect("nobody listens there");
        assert_eq!(error.code_name(), "UNAVAILABLE");
        assert_eq!(error.reason_name(), "PEER_UNREACHABLE");
        assert!(error.to_string().starts_with("UNAVAILABLE (PEER_UNREACHABLE): no lead listens at "));
    }
}

#[test]
fn memory_that_is_none_is_refused_and_other_memory_is_given_back() {
    let nothing = Rank::attach_memory(&ticket("/nowhere/lead.sock"), 0, vec![]).err().expect("it brings none");
    assert_eq!((nothing.code_name(), nothing.reason_name()), ("INVALID_ARGUMENT", "INVALID_FIELD"));
    let other = Ticket { memory_bytes: 7, ..ticket("/nowhere/lead.sock") };
    let error = Rank::attach_memory(&other, 0, vec![vec![0; 8].into()]).err().expect("the pool is smaller");
    assert_eq!((error.code_name(), error.reason_name()), ("FAILED_PRECONDITION", "POOL_KIND_MISMATCH"));
    let error = Rank::attach_memory(&ticket("/nowhere/lead.sock"), 0, vec![vec![0; 8].into()]).err();
    assert_eq!(error.expect("nobody listens there").code_name(), "UNAVAILABLE");
}

#[test]
fn a_path_that_is_too_long_is_refused() {
    let error = Rank::attach(&ticket(&"a".repeat(300)), 0).err().expect("no socket has this path");
    assert_eq!((error.code_name(), error.reason_name()), ("INVALID_ARGUMENT", "INVALID_FIELD"));
}

#[test]
fn an_answer_that_is_none_is_a_typed_error() {
    let folder: PathBuf = env::temp_dir().join(format!("kvgrpc-rank-{}", process::id()));
    fs::create_dir_all(&folder).expect("a temporary folder can be made");
    let path = folder.join("lead.sock");
    let listener = UnixListener::bind(&path).expect("the path is free");
    let lead = thread::spawn(move || {
        let (mut connection, _) = listener.accept().expect("the rank connects");
        let mut first = [0; 64];
        let got = connection.read(&mut first).expect("the rank says what it is");
        assert!(got > 4);
        connection.write_all(&[0xff; 8]).expect("the rank reads it");
    });
    let error = Rank::attach(&ticket(path.to_str().expect("it is UTF-8")), 0).err().expect("that is no frame");
    assert_eq!((error.code_name(), error.reason_name()), ("OUT_OF_RANGE", "LIMIT_EXCEEDED"));
    lead.join().expect("the lead saw what it should");
    fs::remove_dir_all(folder).expect("it is there");
}

#[test]
fn a_ticket_does_not_show_its_secret() {
    assert!(!format!("{:?}", ticket("p")).contains("115"));
    assert!(format!("{:?}", ticket("p")).contains("[REDACTED]"));
}
