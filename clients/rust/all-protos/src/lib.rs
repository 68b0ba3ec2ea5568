//! Generated code of the packages `kvgrpc.v1`, `kvgrpc.peer.v1` and `kvgrpc.session.v1`. Only its test uses it.

#![allow(missing_docs, clippy::all)]

tonic::include_proto!("all");

#[cfg(test)]
mod tests {
    use super::kvgrpc::{peer, session};

    #[test]
    fn every_package_of_the_schema_compiles() {
        let _ = peer::v1::OpenAccessRequest::default();
        let _ = peer::v1::ConnectRankRequest::default();
        let _ = session::v1::ClientFrame::default();
    }
}
